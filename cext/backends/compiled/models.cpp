// Backends, models, instances: what they are told, their states, their reports.
#include "device_memory.h"
#include "objects.h"

using namespace compiled;

API Failed TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor) {
  GIVEN(major);
  GIVEN(minor);
  *major = 1;
  *minor = 19;
  return nullptr;
}

// ---------------------------------------------------------------- memory managers

API Failed TRITONBACKEND_MemoryManagerAllocate(Handle manager, void** buffer, int type, int64_t id, uint64_t size) {
  FOUND(Manager, found, manager);
  GIVEN(buffer);
  *buffer = nullptr;
  if (type == GPU) return allocate_on_device(__func__, id, size, buffer);
  if (type == CPU_PINNED && allocate_locked(size, buffer)) return nullptr;
  if (type != CPU && type != CPU_PINNED) return fail(INVALID_ARG, std::string(__func__) + ": there is no such kind of memory");
  if (posix_memalign(buffer, 64, size > 0 ? size : 1) != 0) {
    *buffer = nullptr;
    return fail(UNAVAILABLE, "there are no " + std::to_string(size) + " bytes of memory left");
  }
  return nullptr;
}

API Failed TRITONBACKEND_MemoryManagerFree(Handle manager, void* buffer, int type, int64_t id) {
  FOUND(Manager, found, manager);
  if (type == GPU) return free_on_device(__func__, id, buffer);
  if (type != CPU && type != CPU_PINNED) return fail(INVALID_ARG, std::string(__func__) + ": there is no such kind of memory");
  if (!free_locked(buffer)) free(buffer);
  return nullptr;
}

// ---------------------------------------------------------------- backends

TELLS(TRITONBACKEND_BackendName, Backend, const char*, found->name.c_str())
TELLS(TRITONBACKEND_BackendConfig, Backend, Handle, found->config->handle)
TELLS(TRITONBACKEND_BackendExecutionPolicy, Backend, int, found->policy)

API Failed TRITONBACKEND_BackendSetExecutionPolicy(Handle backend, int policy) {
  FOUND(Backend, found, backend);
  if (policy != BLOCKING && policy != DEVICE_BLOCKING) return fail(INVALID_ARG, std::string(__func__) + ": there is no such policy");
  found->policy = policy;
  return nullptr;
}

API Failed TRITONBACKEND_BackendArtifacts(Handle backend, int* type, const char** location) {
  FOUND(Backend, found, backend);
  GIVEN(type);
  GIVEN(location);
  *type = 0;
  *location = found->folder.c_str();
  return nullptr;
}

TELLS(TRITONBACKEND_BackendMemoryManager, Backend, Handle, found->manager->handle)
TELLS(TRITONBACKEND_BackendState, Backend, void*, found->state)
SETS(TRITONBACKEND_BackendSetState, Backend, void*, state)

API Failed TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(Handle attribute, int kind, uint64_t count,
                                                                  const uint64_t*, uint64_t) {
  FOUND(BackendAttribute, found, attribute);
  found->groups.push_back({kind, count});
  return nullptr;
}

SETS(TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading, BackendAttribute, bool, parallel)

// ---------------------------------------------------------------- models

TELLS(TRITONBACKEND_ModelName, Model, const char*, found->name.c_str())
TELLS(TRITONBACKEND_ModelVersion, Model, uint64_t, found->version)

API Failed TRITONBACKEND_ModelRepository(Handle model, int* type, const char** location) {
  FOUND(Model, found, model);
  GIVEN(type);
  GIVEN(location);
  *type = 0;
  *location = found->repository.c_str();
  return nullptr;
}

static Failed check_version(const char* function, uint32_t version) {
  if (version == 1) return nullptr;
  return fail(INVALID_ARG, std::string(function) + ": model configuration version " + std::to_string(version) +
                               " is not known, the only one is 1");
}

API Failed TRITONBACKEND_ModelConfig(Handle model, uint32_t version, Handle* config) {
  FOUND(Model, found, model);
  GIVEN(config);
  if (Failed failed = check_version(__func__, version)) return failed;
  std::lock_guard<std::mutex> held(found->lock);
  *config = add(std::make_shared<Message>(found->config, false));
  return nullptr;
}

TELLS(TRITONBACKEND_ModelAutoCompleteConfig, Model, bool, found->auto_complete)

API Failed TRITONBACKEND_ModelSetConfig(Handle model, uint32_t version, Handle config) {
  FOUND(Model, found, model);
  FOUND(Message, message, config);
  if (Failed failed = check_version(__func__, version)) return failed;
  std::lock_guard<std::mutex> held(found->lock);
  if (!found->settable) {
    return fail(UNSUPPORTED, std::string(__func__) + " can only be called in TRITONBACKEND_ModelInitialize");
  }
  found->config = message->json;
  return nullptr;
}

TELLS(TRITONBACKEND_ModelServer, Model, Handle, found->server->handle)
TELLS(TRITONBACKEND_ModelBackend, Model, Handle, found->backend->handle)
TELLS(TRITONBACKEND_ModelState, Model, void*, found->state)
SETS(TRITONBACKEND_ModelSetState, Model, void*, state)

// ---------------------------------------------------------------- instances

TELLS(TRITONBACKEND_ModelInstanceName, Instance, const char*, found->name.c_str())
TELLS(TRITONBACKEND_ModelInstanceKind, Instance, int, found->kind)
TELLS(TRITONBACKEND_ModelInstanceDeviceId, Instance, int32_t, found->device)
TELLS(TRITONBACKEND_ModelInstanceHostPolicy, Instance, Handle, found->host_policy->handle)
TELLS(TRITONBACKEND_ModelInstanceIsPassive, Instance, bool, found->passive)
TELLS(TRITONBACKEND_ModelInstanceProfileCount, Instance, uint32_t, uint32_t(found->profiles.size()))

static Failed no_such(const char* function, uint32_t index, size_t count) {
  return fail(INVALID_ARG, std::string(function) + ": out of bounds index " + std::to_string(index) + ", there are " +
                               std::to_string(count));
}

API Failed TRITONBACKEND_ModelInstanceProfileName(Handle instance, uint32_t index, const char** name) {
  FOUND(Instance, found, instance);
  GIVEN(name);
  if (index >= found->profiles.size()) return no_such(__func__, index, found->profiles.size());
  *name = found->profiles[index].c_str();
  return nullptr;
}

TELLS(TRITONBACKEND_ModelInstanceSecondaryDeviceCount, Instance, uint32_t, uint32_t(found->secondary.size()))

API Failed TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(Handle instance, uint32_t index, const char** kind,
                                                                int64_t* id) {
  FOUND(Instance, found, instance);
  GIVEN(kind);
  GIVEN(id);
  if (index >= found->secondary.size()) return no_such(__func__, index, found->secondary.size());
  *kind = found->secondary[index].first.c_str();
  *id = found->secondary[index].second;
  return nullptr;
}

TELLS(TRITONBACKEND_ModelInstanceModel, Instance, Handle, found->model->handle)
TELLS(TRITONBACKEND_ModelInstanceState, Instance, void*, found->state)
SETS(TRITONBACKEND_ModelInstanceSetState, Instance, void*, state)

// ---------------------------------------------------------------- what instances report

API Failed TRITONBACKEND_ModelInstanceReportStatistics(Handle instance, Handle request, bool success, uint64_t exec_start,
                                                       uint64_t compute_start, uint64_t compute_end, uint64_t exec_end) {
  FOUND(Instance, found, instance);
  FOUND(Request, asked, request);
  const auto reply = asked->reply;
  const compiled_stated told = {1, success, {exec_start, compute_start, compute_end, exec_end}};
  {
    std::lock_guard<std::mutex> held(reply->lock);
    if (reply->stated.said) return fail(INVALID_ARG, std::string(__func__) + ": the request was reported before");
    reply->stated = told;
    if (!reply->over) return nullptr;  // it goes with the last response
  }
  host.stated(reply->key, &told);
  return nullptr;
}

API Failed TRITONBACKEND_ModelInstanceReportBatchStatistics(Handle instance, uint64_t size, uint64_t exec_start,
                                                            uint64_t compute_start, uint64_t compute_end, uint64_t exec_end) {
  FOUND(Instance, found, instance);
  const compiled_execution told = {size, {exec_start, compute_start, compute_end, exec_end}};
  {
    std::lock_guard<std::mutex> held(found->lock);
    if (found->executing) {
      if (found->executions.size() >= MOST_EXECUTIONS) {
        return fail(UNAVAILABLE, std::string(__func__) + ": more than " + std::to_string(MOST_EXECUTIONS) +
                                     " executions are reported in one");
      }
      found->executions.push_back(told);
      return nullptr;
    }
  }
  host.executed(&told);
  return nullptr;
}

// as many rows as the server takes of a process (backends/python/isolated.py): one for each GPU, and what is page-locked
enum { MOST_GPUS = 63 };

// Both reports are kept, and the server is told the sum. It sees by itself how much ordinary memory the process has.
static Failed report(const char* function, Model& model, std::vector<compiled_memory>& kept, const Handle* usage,
                     uint32_t count) {
  if (usage == nullptr && count > 0) return missing(function, "usage");
  std::vector<compiled_memory> told;
  for (uint32_t i = 0; i < count; i++) {
    const auto one = find<Attributes>(usage[i]);
    if (!one) return missing(function, "Attributes handle");
    if (one->type < CPU || one->type > GPU) return fail(INVALID_ARG, std::string(function) + ": there is no such kind of memory");
    if (one->type == GPU && (one->id < 0 || one->id >= MOST_GPUS)) {
      return fail(INVALID_ARG, std::string(function) + ": there is no GPU " + std::to_string(one->id));
    }
    if (one->type != CPU) told.push_back({one->type, one->type == GPU ? one->id : 0, one->size});
  }
  {
    std::lock_guard<std::mutex> held(model.lock);
    kept.swap(told);
    told = model.memory;
    told.insert(told.end(), model.instance_memory.begin(), model.instance_memory.end());
  }
  host.memory(told.data(), uint32_t(told.size()));
  return nullptr;
}

API Failed TRITONBACKEND_ModelReportMemoryUsage(Handle model, const Handle* usage, uint32_t count) {
  FOUND(Model, found, model);
  return report(__func__, *found, found->memory, usage, count);
}

API Failed TRITONBACKEND_ModelInstanceReportMemoryUsage(Handle instance, const Handle* usage, uint32_t count) {
  FOUND(Instance, found, instance);
  return report(__func__, *found->model, found->model->instance_memory, usage, count);
}
