// Errors, messages, parameters, attributes of buffers, names of numbers, log lines.
#include "objects.h"

namespace compiled {

compiled_host host = {};

Failed fail(int code, const std::string& text) { return add(std::make_shared<Error>(code, text)); }

Failed missing(const char* function, const char* what) {
  return fail(INVALID_ARG, std::string(function) + ": " + what + " is null, of another type, or was released before");
}

Failed unsupported(const char* function, const char* why) {
  std::string text = std::string(function) + " is not supported by this server";
  if (why != nullptr) text += std::string(": ") + why;
  return fail(UNSUPPORTED, text);
}

int put(int code, const std::string& error, char* text, size_t room) {
  if (code == COMPILED_FINE) return code;
  if (room > 0) {
    const size_t length = error.size() < room ? error.size() : room - 1;
    memcpy(text, error.data(), length);
    text[length] = 0;
  }
  return code;
}

int said(Failed error, std::string* text) {
  if (error == nullptr) return COMPILED_FINE;
  const auto found = take<Error>(error);
  if (!found) {
    *text = "the backend returned an error that is none, or was deleted before";
    return INTERNAL;
  }
  *text = found->text;
  return found->code;
}

const void* Value::address() const {
  switch (type) {
    case INT: return &integer;
    case BOOL: return &boolean;
    case DOUBLE: return &number;
    default: return string.c_str();
  }
}

Value value_of(const compiled_parameter& given) {
  Value made;
  made.name = text_of(given.name);
  made.type = given.type;
  if (given.string != nullptr) made.string.assign(given.string, given.size);
  made.integer = given.integer;
  made.boolean = given.boolean != 0;
  made.number = given.number;
  return made;
}

compiled_parameter given_of(const Value& value) {
  return {value.name.c_str(), value.type, value.string.c_str(), value.string.size(), value.integer, value.boolean,
          value.number};
}

std::vector<compiled_parameter> given_of(const std::vector<Value>& values) {
  std::vector<compiled_parameter> made;
  for (const Value& value : values) made.push_back(given_of(value));
  return made;
}

static const struct { const char* name; uint32_t size; } DATATYPES[] = {
    {"<invalid>", 0}, {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4}, {"UINT64", 8}, {"INT8", 1}, {"INT16", 2},
    {"INT32", 4},     {"INT64", 8}, {"FP16", 2},  {"FP32", 4},   {"FP64", 8},   {"BYTES", 0},  {"BF16", 2}};

const char* datatype_name(int datatype) {
  return datatype > INVALID && datatype <= LAST_DATATYPE ? DATATYPES[datatype].name : DATATYPES[INVALID].name;
}

size_t datatype_size(int datatype) {
  return datatype > INVALID && datatype <= LAST_DATATYPE ? DATATYPES[datatype].size : 0;
}

// what the server takes from a process (ring_reader.pyx)
const size_t MOST_DIMENSIONS = 64;
const int64_t LONGEST_DIMENSION = int64_t(1) << 40;
const uint64_t MOST_ELEMENTS = uint64_t(1) << 48;

const uint64_t MOST_TOLD_DIMENSIONS = 1024;
const uint64_t MOST_SIZE = uint64_t(1) << 47;

Failed beyond(const char* function, uint64_t size) {
  if (size < MOST_SIZE) return nullptr;
  return fail(INVALID_ARG, std::string(function) + ": there are no " + std::to_string(size) + " bytes");
}

Failed shape_of(const char* function, const char* name, const int64_t* shape, uint64_t dims, Tensor* made) {
  if (name == nullptr || (shape == nullptr && dims > 0)) return missing(function, "name or shape");
  if (dims > MOST_TOLD_DIMENSIONS) {
    return fail(INVALID_ARG, std::string(function) + ": there are no tensors of " + std::to_string(dims) + " dimensions");
  }
  made->name = name;
  made->shape.assign(shape, shape + dims);
  return nullptr;
}

bool whole(const Tensor& tensor, std::string* why) {
  uint64_t elements = 1;
  if (tensor.shape.size() > MOST_DIMENSIONS) {
    *why = "it has more than " + std::to_string(MOST_DIMENSIONS) + " dimensions";
    return false;
  }
  for (const int64_t dimension : tensor.shape) {
    if (dimension < 0 || dimension > LONGEST_DIMENSION || (elements > 0 && uint64_t(dimension) > MOST_ELEMENTS / elements)) {
      *why = "a dimension is negative or too large";
      return false;
    }
    elements *= uint64_t(dimension);
  }
  if (tensor.datatype != BYTES) {
    const uint64_t needed = elements * datatype_size(tensor.datatype);
    if (needed == tensor.size) return true;
    *why = "its shape needs " + std::to_string(needed) + " bytes, its buffer has " + std::to_string(tensor.size);
    return false;
  }
  const char* at = static_cast<const char*>(tensor.data);
  size_t left = tensor.size;
  uint64_t counted = 0;
  while (left >= 4) {
    uint32_t length;
    memcpy(&length, at, 4);
    if (length > left - 4) break;
    at += 4 + size_t(length);
    left -= 4 + size_t(length);
    counted++;
  }
  if (left == 0 && counted == elements) return true;
  *why = "its buffer does not hold " + std::to_string(elements) + " strings, each behind its length in 4 bytes";
  return false;
}

}  // namespace compiled

using namespace compiled;

// ---------------------------------------------------------------- errors

// A code below 0 is none, and would be FINE.
API Failed TRITONSERVER_ErrorNew(int code, const char* text) { return fail(code < 0 ? int(UNKNOWN) : code, text_of(text)); }

API void TRITONSERVER_ErrorDelete(Failed error) { take<Error>(error); }

API int TRITONSERVER_ErrorCode(Failed error) {
  const auto found = find<Error>(error);
  return found ? found->code : int(UNKNOWN);
}

API const char* TRITONSERVER_ErrorCodeString(Failed error) {
  static const char* const NAMES[] = {"Unknown",     "Internal",    "Not found",      "Invalid argument",
                                      "Unavailable", "Unsupported", "Already exists", "Cancelled"};
  const auto found = find<Error>(error);
  return found && found->code >= 0 && found->code <= CANCELLED ? NAMES[found->code] : "<invalid code>";
}

API const char* TRITONSERVER_ErrorMessage(Failed error) {
  const auto found = find<Error>(error);
  return found ? found->text.c_str() : "";  // it stays until the error is deleted
}

// ---------------------------------------------------------------- messages

API Failed TRITONSERVER_MessageNewFromSerializedJson(Handle* message, const char* base, size_t size) {
  if (message == nullptr || (base == nullptr && size > 0)) return missing(__func__, "message or base");
  if (Failed failed = beyond(__func__, size)) return failed;
  *message = add(std::make_shared<Message>(size > 0 ? std::string(base, size) : std::string(), false));
  return nullptr;
}

API Failed TRITONSERVER_MessageDelete(Handle message) {
  const auto found = find<Message>(message);
  if (found && found->kept) return fail(INVALID_ARG, std::string(__func__) + ": the message belongs to the server");
  return message == nullptr || take<Message>(message) ? nullptr : missing(__func__, "message");
}

API Failed TRITONSERVER_MessageSerializeToJson(Handle message, const char** base, size_t* size) {
  const auto found = find<Message>(message);
  if (!found || base == nullptr || size == nullptr) return missing(__func__, "message");
  *base = found->json.c_str();
  *size = found->json.size();
  return nullptr;
}

// ---------------------------------------------------------------- parameters

API Handle TRITONSERVER_ParameterNew(const char* name, int type, const void* value) {
  if (name == nullptr || value == nullptr || type < STRING || type > DOUBLE || type == RAW) return nullptr;
  const auto made = std::make_shared<Parameter>();
  made->value.name = name;
  made->value.type = type;
  if (type == STRING) made->value.string = static_cast<const char*>(value);
  if (type == INT) memcpy(&made->value.integer, value, sizeof(int64_t));
  if (type == BOOL) made->value.boolean = *static_cast<const unsigned char*>(value) != 0;
  if (type == DOUBLE) memcpy(&made->value.number, value, sizeof(double));
  return add(made);
}

API Handle TRITONSERVER_ParameterBytesNew(const char* name, const void* data, uint64_t size) {
  if (name == nullptr || (data == nullptr && size > 0) || size >= MOST_SIZE) return nullptr;
  const auto made = std::make_shared<Parameter>();
  made->value.name = name;
  made->value.type = RAW;
  if (size > 0) made->value.string.assign(static_cast<const char*>(data), size);
  return add(made);
}

API void TRITONSERVER_ParameterDelete(Handle parameter) { take<Parameter>(parameter); }

// ---------------------------------------------------------------- attributes of buffers

Attached::~Attached() {
  if (made) take<Attributes>(made->handle);
}

Handle Attached::attributes(size_t size) {
  std::lock_guard<std::mutex> held(lock);
  if (!made) {
    made = std::make_shared<Attributes>(true);
    add(made);
  }
  made->size = size;
  return made->handle;
}

API Failed TRITONSERVER_BufferAttributesNew(Handle* attributes) {
  if (attributes == nullptr) return missing(__func__, "attributes");
  *attributes = add(std::make_shared<Attributes>(false));
  return nullptr;
}

API Failed TRITONSERVER_BufferAttributesDelete(Handle attributes) {
  const auto found = find<Attributes>(attributes);
  if (found && found->kept) return fail(INVALID_ARG, std::string(__func__) + ": they belong to the server");
  return attributes == nullptr || take<Attributes>(attributes) ? nullptr : missing(__func__, "attributes");
}

#define ATTRIBUTE(NAME, TYPE, FIELD)                                              \
  API Failed TRITONSERVER_BufferAttributes##NAME(Handle attributes, TYPE* value) { \
    const auto found = find<Attributes>(attributes);                              \
    if (!found || value == nullptr) return missing(__func__, "attributes");       \
    *value = static_cast<TYPE>(found->FIELD);                                                 \
    return nullptr;                                                               \
  }                                                                               \
  API Failed TRITONSERVER_BufferAttributesSet##NAME(Handle attributes, TYPE value) { \
    const auto found = find<Attributes>(attributes);                              \
    if (!found) return missing(__func__, "attributes");                           \
    found->FIELD = static_cast<decltype(found->FIELD)>(value);                                       \
    return nullptr;                                                               \
  }
ATTRIBUTE(MemoryTypeId, int64_t, id)
ATTRIBUTE(MemoryType, int, type)
ATTRIBUTE(CudaIpcHandle, void*, cuda)
ATTRIBUTE(ByteSize, size_t, size)

// ---------------------------------------------------------------- names of numbers

API const char* TRITONSERVER_DataTypeString(int datatype) { return datatype_name(datatype); }
API uint32_t TRITONSERVER_DataTypeByteSize(int datatype) { return uint32_t(datatype_size(datatype)); }

API int TRITONSERVER_StringToDataType(const char* name) {
  for (int i = INVALID + 1; name != nullptr && i <= LAST_DATATYPE; i++) {
    if (strcmp(name, DATATYPES[i].name) == 0) return i;
  }
  return INVALID;
}

API const char* TRITONSERVER_MemoryTypeString(int type) {
  static const char* const NAMES[] = {"CPU", "CPU_PINNED", "GPU"};
  return type >= CPU && type <= GPU ? NAMES[type] : "<invalid>";
}

API const char* TRITONSERVER_ParameterTypeString(int type) {
  static const char* const NAMES[] = {"STRING", "INT", "BOOL", "BYTES", "DOUBLE"};
  return type >= STRING && type <= DOUBLE ? NAMES[type] : "<invalid>";
}

API const char* TRITONSERVER_InstanceGroupKindString(int kind) {
  static const char* const NAMES[] = {"AUTO", "CPU", "GPU", "MODEL"};
  return kind >= 0 && kind <= 3 ? NAMES[kind] : "<invalid>";
}

// ---------------------------------------------------------------- the log

API bool TRITONSERVER_LogIsEnabled(int level) {
  return level >= 0 && level <= VERBOSE && (host.shown == nullptr || host.shown[level] != 0);
}

API Failed TRITONSERVER_LogMessage(int level, const char* file, const int line, const char* text) {
  if (text == nullptr) return missing(__func__, "text");
  host.log(level, file == nullptr ? "" : file, line, text);
  return nullptr;
}

API Failed TRITONSERVER_ApiVersion(uint32_t* major, uint32_t* minor) {
  if (major == nullptr || minor == nullptr) return missing(__func__, "a number");
  *major = 1;
  *minor = 37;
  return nullptr;
}
