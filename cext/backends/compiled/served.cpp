// What backends ask of the server, and what they read of the responses to their requests.
#include "calls.h"

using namespace compiled;

static Failed from_host(int code, const char* text) { return code == COMPILED_FINE ? nullptr : fail(code, text); }

// ---------------------------------------------------------------- responses to calls

DELETES(TRITONSERVER_InferenceResponseDelete, CallResponse)

API Failed TRITONSERVER_InferenceResponseError(Handle response) {
  FOUND(CallResponse, found, response);
  return found->error ? found->error->handle : nullptr;
}

API Failed TRITONSERVER_InferenceResponseModel(Handle response, const char** name, int64_t* version) {
  FOUND(CallResponse, found, response);
  GIVEN(name);
  GIVEN(version);
  *name = found->model.c_str();
  *version = found->version;
  return nullptr;
}

TELLS(TRITONSERVER_InferenceResponseId, CallResponse, const char*, found->id.c_str())
TELLS(TRITONSERVER_InferenceResponseParameterCount, CallResponse, uint32_t, uint32_t(found->parameters.size()))

API Failed TRITONSERVER_InferenceResponseParameter(Handle response, uint32_t index, const char** name, int* type,
                                                   const void** value) {
  FOUND(CallResponse, found, response);
  GIVEN(name);
  GIVEN(type);
  GIVEN(value);
  if (index >= found->parameters.size()) return fail(INVALID_ARG, std::string(__func__) + ": out of bounds index");
  const Value& parameter = found->parameters[index];
  *name = parameter.name.c_str();
  *type = parameter.type;
  *value = parameter.address();
  return nullptr;
}

TELLS(TRITONSERVER_InferenceResponseOutputCount, CallResponse, uint32_t, uint32_t(found->outputs.size()))

API Failed TRITONSERVER_InferenceResponseOutput(Handle response, uint32_t index, const char** name, int* datatype,
                                                const int64_t** shape, uint64_t* dims, const void** base, size_t* size,
                                                int* type, int64_t* id, void** with) {
  FOUND(CallResponse, found, response);
  if (index >= found->outputs.size()) return fail(INVALID_ARG, std::string(__func__) + ": out of bounds index");
  const CallOutput& output = found->outputs[index];
  if (name != nullptr) *name = output.tensor.name.c_str();
  if (datatype != nullptr) *datatype = output.tensor.datatype;
  if (shape != nullptr) *shape = output.tensor.shape.data();
  if (dims != nullptr) *dims = output.tensor.shape.size();
  if (base != nullptr) *base = output.buffer;
  if (size != nullptr) *size = output.tensor.size;
  if (type != nullptr) *type = output.type;
  if (id != nullptr) *id = output.id;
  if (with != nullptr) *with = output.with;
  return nullptr;
}

static void take_labels(void* with, const char* texts, size_t size) {
  auto* labels = static_cast<std::vector<std::string>*>(with);
  for (size_t at = 0; at < size; at += labels->back().size() + 1) labels->emplace_back(texts + at);
}

// The server is asked once for the labels of an output; they stay as long as the response.
API Failed TRITONSERVER_InferenceResponseOutputClassificationLabel(Handle response, uint32_t index, size_t place,
                                                                   const char** label) {
  FOUND(CallResponse, found, response);
  GIVEN(label);
  if (index >= found->outputs.size()) return fail(INVALID_ARG, std::string(__func__) + ": out of bounds index");
  bool known;
  {
    std::lock_guard<std::mutex> held(found->lock);
    known = found->labels.count(index) > 0;
  }
  if (!known) {
    std::vector<std::string> labels;
    char text[2048] = "";
    const int code = host.labels(found->model.c_str(), found->version, found->outputs[index].tensor.name.c_str(), take_labels,
                                 &labels, text, sizeof text);
    if (code != COMPILED_FINE) return fail(code, text);
    std::lock_guard<std::mutex> held(found->lock);
    found->labels.emplace(index, std::move(labels));  // the first stay, whose texts may have been given away
  }
  std::lock_guard<std::mutex> held(found->lock);
  const std::vector<std::string>& labels = found->labels[index];
  *label = place < labels.size() && !labels[place].empty() ? labels[place].c_str() : nullptr;
  return nullptr;
}

// ---------------------------------------------------------------- the server

API Failed TRITONSERVER_ServerIsLive(Handle server, bool* live) {
  FOUND(Server, found, server);
  GIVEN(live);
  *live = true;  // or this process would have ended
  return nullptr;
}

API Failed TRITONSERVER_ServerModelIsReady(Handle server, const char* model, int64_t version, bool* ready) {
  FOUND(Server, found, server);
  GIVEN(ready);
  if (model == nullptr) return missing(__func__, "the model's name");
  char text[2048] = "";
  int answer = 0;
  const int code = host.ready(model, version, &answer, text, sizeof text);
  *ready = answer != 0;
  return from_host(code, text);
}

API Failed TRITONSERVER_ServerModelTransactionProperties(Handle server, const char* model, int64_t version,
                                                         uint32_t* flags, void** with) {
  FOUND(Server, found, server);
  GIVEN(flags);
  if (model == nullptr) return missing(__func__, "the model's name");
  char text[2048] = "";
  int decoupled = 0;
  const int code = host.decoupled(model, version, &decoupled, text, sizeof text);
  *flags = decoupled ? 2 : 1;
  if (with != nullptr) *with = nullptr;
  return from_host(code, text);
}

API Failed TRITONSERVER_ServerLoadModelWithParameters(Handle server, const char* model, const Handle* parameters,
                                                      uint64_t count) {
  FOUND(Server, found, server);
  if (model == nullptr || (parameters == nullptr && count > 0)) return missing(__func__, "model or parameters");
  std::vector<std::shared_ptr<Parameter>> held;
  std::vector<compiled_parameter> given;
  for (uint64_t i = 0; i < count; i++) {
    const auto one = find<Parameter>(parameters[i]);
    if (!one) return missing(__func__, "a parameter");
    held.push_back(one);
    given.push_back(given_of(one->value));
  }
  char text[4096] = "";
  return from_host(host.load(model, given.data(), uint32_t(given.size()), text, sizeof text), text);
}

API Failed TRITONSERVER_ServerLoadModel(Handle server, const char* model) {
  return TRITONSERVER_ServerLoadModelWithParameters(server, model, nullptr, 0);
}

API Failed TRITONSERVER_ServerUnloadModel(Handle server, const char* model) {
  FOUND(Server, found, server);
  if (model == nullptr) return missing(__func__, "the model's name");
  char text[4096] = "";
  return from_host(host.unload(model, 0, text, sizeof text), text);
}

API Failed TRITONSERVER_ServerUnloadModelAndDependents(Handle server, const char* model) {
  FOUND(Server, found, server);
  if (model == nullptr) return missing(__func__, "the model's name");
  char text[4096] = "";
  return from_host(host.unload(model, 1, text, sizeof text), text);
}

// ---------------------------------------------------------------- what the server says of itself and of its models

static void take_text(void* with, const char* json, size_t size) { static_cast<std::string*>(with)->assign(json, size); }

static Failed asked(int subject, const char* model, int64_t version, std::string* json) {
  char text[2048] = "";
  return from_host(host.describe(subject, model, version, take_text, json, text, sizeof text), text);
}

static Failed described(int subject, const char* model, int64_t version, Handle* message) {
  std::string json;
  if (Failed failed = asked(subject, model, version, &json)) return failed;
  *message = add(std::make_shared<Message>(std::move(json), false));
  return nullptr;
}

API Failed TRITONSERVER_ServerIsReady(Handle server, bool* ready) {
  FOUND(Server, found, server);
  GIVEN(ready);
  std::string json;
  Failed failed = asked(COMPILED_READY, "", -1, &json);
  *ready = json == "true";
  return failed;
}

API Failed TRITONSERVER_ServerMetadata(Handle server, Handle* message) {
  FOUND(Server, found, server);
  GIVEN(message);
  return described(COMPILED_SERVER, "", -1, message);
}

API Failed TRITONSERVER_ServerModelMetadata(Handle server, const char* model, int64_t version, Handle* message) {
  FOUND(Server, found, server);
  GIVEN(message);
  if (model == nullptr) return missing(__func__, "the model's name");
  return described(COMPILED_METADATA, model, version, message);
}

API Failed TRITONSERVER_ServerModelConfig(Handle server, const char* model, int64_t version, uint32_t format, Handle* message) {
  FOUND(Server, found, server);
  GIVEN(message);
  if (model == nullptr) return missing(__func__, "the model's name");
  if (format != 1) {
    return fail(UNSUPPORTED, std::string(__func__) + ": configurations are written in version 1, not " + std::to_string(format));
  }
  return described(COMPILED_CONFIG, model, version, message);
}

API Failed TRITONSERVER_ServerModelStatistics(Handle server, const char* model, int64_t version, Handle* message) {
  FOUND(Server, found, server);
  GIVEN(message);
  return described(COMPILED_STATISTICS, model == nullptr ? "" : model, version, message);
}

API Failed TRITONSERVER_ServerModelIndex(Handle server, uint32_t flags, Handle* message) {
  FOUND(Server, found, server);
  GIVEN(message);
  if (flags > 1) return fail(INVALID_ARG, std::string(__func__) + ": flags must be 0 or INDEX_FLAG_READY");
  return described(flags == 1 ? COMPILED_READY_INDEX : COMPILED_INDEX, "", -1, message);
}

API Failed TRITONSERVER_ServerModelBatchProperties(Handle server, const char* model, int64_t version, uint32_t* flags,
                                                   void** with) {
  FOUND(Server, found, server);
  GIVEN(flags);
  if (model == nullptr) return missing(__func__, "the model's name");
  std::string json;
  Failed failed = asked(COMPILED_BATCHING, model, version, &json);
  *flags = json == "true" ? 2 : 1;
  if (with != nullptr) *with = nullptr;
  return failed;
}

// ---------------------------------------------------------------- the server's metrics

namespace compiled {

struct Metrics : Object {
  static constexpr Kind KIND = Kind::METRICS;
  explicit Metrics(std::string text) : Object(KIND), text(std::move(text)) {}
  const std::string text;
};

}  // namespace compiled

API Failed TRITONSERVER_ServerMetrics(Handle server, Handle* metrics) {
  FOUND(Server, found, server);
  GIVEN(metrics);
  std::string text;
  if (Failed failed = asked(COMPILED_METRICS, "", -1, &text)) return failed;
  *metrics = add(std::make_shared<Metrics>(std::move(text)));
  return nullptr;
}

DELETES(TRITONSERVER_MetricsDelete, Metrics)

API Failed TRITONSERVER_MetricsFormatted(Handle metrics, int format, const char** base, size_t* size) {
  FOUND(Metrics, found, metrics);
  GIVEN(base);
  GIVEN(size);
  if (format != 0) return fail(INVALID_ARG, std::string(__func__) + ": there is no format " + std::to_string(format));
  *base = found->text.data();
  *size = found->text.size();
  return nullptr;
}
