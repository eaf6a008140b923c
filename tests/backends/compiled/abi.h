/* What the test's backends call of the interface, in our own words: every object is an opaque pointer. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void* object;
typedef void* error;

enum { INTERNAL = 1, NOT_FOUND = 2, INVALID_ARG = 3, UNAVAILABLE = 4, UNSUPPORTED = 5, CANCELLED = 7 };
enum { BYTES = 13 };

error TRITONSERVER_ErrorNew(int code, const char* text);
void TRITONSERVER_ErrorDelete(error failed);
int TRITONSERVER_ErrorCode(error failed);
const char* TRITONSERVER_ErrorMessage(error failed);
error TRITONSERVER_MessageNewFromSerializedJson(object* message, const char* base, size_t size);
error TRITONSERVER_MessageSerializeToJson(object message, const char** base, size_t* size);
error TRITONSERVER_MessageDelete(object message);
error TRITONSERVER_LogMessage(int level, const char* file, int line, const char* text);
object TRITONSERVER_ParameterNew(const char* name, int type, const void* value);
void TRITONSERVER_ParameterDelete(object parameter);
error TRITONSERVER_MetricFamilyNew(object* family, int kind, const char* name, const char* description);
error TRITONSERVER_MetricNew(object* metric, object family, object* labels, uint64_t count);
error TRITONSERVER_MetricIncrement(object metric, double value);
error TRITONSERVER_MetricValue(object metric, double* value);
error TRITONSERVER_ServerNew(object* server, object options);
error TRITONSERVER_ServerModelTransactionProperties(object server, const char* name, int64_t version, uint32_t* flags,
                                                    void** with);
error TRITONSERVER_ServerModelIsReady(object server, const char* name, int64_t version, bool* ready);
error TRITONSERVER_InferenceRequestNew(object* call, object server, const char* model, int64_t version);
error TRITONSERVER_InferenceRequestDelete(object call);
error TRITONSERVER_InferenceRequestAddInput(object call, const char* name, int datatype, const int64_t* shape, uint64_t dims);
error TRITONSERVER_InferenceRequestAppendInputData(object call, const char* name, const void* base, size_t size, int type,
                                                   int64_t id);
error TRITONSERVER_InferenceRequestSetReleaseCallback(object call, void (*released)(object, uint32_t, void*), void* with);
error TRITONSERVER_InferenceRequestSetResponseCallback(object call, object allocator, void* allocator_with,
                                                       void (*responded)(object, uint32_t, void*), void* with);
error TRITONSERVER_ResponseAllocatorNew(object* allocator, void* allocate, void* release, void* start);
error TRITONSERVER_ServerInferAsync(object server, object call, object trace);
error TRITONSERVER_InferenceResponseError(object response);
error TRITONSERVER_InferenceResponseOutputClassificationLabel(object response, uint32_t index, size_t place, const char** label);
error TRITONSERVER_InferenceRequestAddRawInput(object call, const char* name);
error TRITONSERVER_InferenceResponseOutput(object response, uint32_t index, const char** name, int* datatype,
                                           const int64_t** shape, uint64_t* dims, const void** base, size_t* size, int* type,
                                           int64_t* id, void** with);
error TRITONSERVER_InferenceResponseDelete(object response);

error TRITONBACKEND_ApiVersion(uint32_t* major, uint32_t* minor);
error TRITONBACKEND_BackendName(object backend, const char** name);
error TRITONBACKEND_BackendConfig(object backend, object* config);
error TRITONBACKEND_BackendArtifacts(object backend, int* type, const char** location);
error TRITONBACKEND_BackendMemoryManager(object backend, object* manager);
error TRITONBACKEND_MemoryManagerAllocate(object manager, void** buffer, int type, int64_t id, uint64_t size);
error TRITONBACKEND_MemoryManagerFree(object manager, void* buffer, int type, int64_t id);
error TRITONBACKEND_BackendSetState(object backend, void* state);
error TRITONBACKEND_BackendState(object backend, void** state);
error TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(object attribute, int kind, uint64_t count,
                                                              const uint64_t* ids, uint64_t id_count);
error TRITONBACKEND_ModelName(object model, const char** name);
error TRITONBACKEND_ModelVersion(object model, uint64_t* version);
error TRITONBACKEND_ModelRepository(object model, int* type, const char** location);
error TRITONBACKEND_ModelConfig(object model, uint32_t version, object* config);
error TRITONBACKEND_ModelAutoCompleteConfig(object model, bool* complete);
error TRITONBACKEND_ModelSetConfig(object model, uint32_t version, object config);
error TRITONBACKEND_ModelServer(object model, object* server);
error TRITONBACKEND_ModelBackend(object model, object* backend);
error TRITONBACKEND_ModelSetState(object model, void* state);
error TRITONBACKEND_ModelInstanceName(object instance, const char** name);
error TRITONBACKEND_ModelInstanceKind(object instance, int* kind);
error TRITONBACKEND_ModelInstanceModel(object instance, object* model);
error TRITONBACKEND_ModelInstanceReportStatistics(object instance, object request, bool success, uint64_t exec_start,
                                                  uint64_t compute_start, uint64_t compute_end, uint64_t exec_end);
error TRITONBACKEND_ModelInstanceReportBatchStatistics(object instance, uint64_t batch_size, uint64_t exec_start,
                                                       uint64_t compute_start, uint64_t compute_end, uint64_t exec_end);
error TRITONBACKEND_ModelInstanceResponseStatisticsNew(object* statistics);
error TRITONBACKEND_ModelInstanceResponseStatisticsDelete(object statistics);
error TRITONBACKEND_ModelInstanceResponseStatisticsSetModelInstance(object statistics, object instance);
error TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseFactory(object statistics, object factory);
error TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseStart(object statistics, uint64_t ns);
error TRITONBACKEND_ModelInstanceResponseStatisticsSetComputeOutputStart(object statistics, uint64_t ns);
error TRITONBACKEND_ModelInstanceResponseStatisticsSetResponseEnd(object statistics, uint64_t ns);
error TRITONBACKEND_ModelInstanceResponseStatisticsSetError(object statistics, error failed);
error TRITONBACKEND_ModelInstanceReportResponseStatistics(object statistics);
error TRITONBACKEND_RequestId(object request, const char** id);
error TRITONBACKEND_RequestCorrelationId(object request, uint64_t* id);
error TRITONBACKEND_RequestFlags(object request, uint32_t* flags);
error TRITONBACKEND_RequestIsCancelled(object request, bool* cancelled);
error TRITONBACKEND_InferenceRequestTimeoutMicroseconds(object request, uint64_t* timeout);
error TRITONBACKEND_RequestParameterCount(object request, uint32_t* count);
error TRITONBACKEND_RequestParameter(object request, uint32_t index, const char** key, int* type, const void** value);
error TRITONBACKEND_RequestInputCount(object request, uint32_t* count);
error TRITONBACKEND_RequestInputByIndex(object request, uint32_t index, object* input);
error TRITONBACKEND_RequestInput(object request, const char* name, object* input);
error TRITONBACKEND_RequestOutputCount(object request, uint32_t* count);
error TRITONBACKEND_RequestOutputName(object request, uint32_t index, const char** name);
error TRITONBACKEND_RequestRelease(object request, uint32_t flags);
error TRITONBACKEND_InputProperties(object input, const char** name, int* datatype, const int64_t** shape, uint32_t* dims,
                                    uint64_t* size, uint32_t* buffers);
error TRITONBACKEND_InputBuffer(object input, uint32_t index, const void** buffer, uint64_t* size, int* type, int64_t* id);
error TRITONBACKEND_ResponseNew(object* response, object request);
error TRITONBACKEND_ResponseNewFromFactory(object* response, object factory);
error TRITONBACKEND_ResponseFactoryNew(object* factory, object request);
error TRITONBACKEND_ResponseFactorySendFlags(object factory, uint32_t flags);
error TRITONBACKEND_ResponseFactoryDelete(object factory);
error TRITONBACKEND_ResponseOutput(object response, object* output, const char* name, int datatype, const int64_t* shape,
                                   uint32_t dims);
error TRITONBACKEND_OutputBuffer(object output, void** buffer, uint64_t size, int* type, int64_t* id);
error TRITONBACKEND_ResponseSetStringParameter(object response, const char* name, const char* value);
error TRITONBACKEND_ResponseSetIntParameter(object response, const char* name, int64_t value);
error TRITONBACKEND_ResponseSetBoolParameter(object response, const char* name, bool value);
error TRITONBACKEND_ResponseSetDoubleParameter(object response, const char* name, double value);
error TRITONBACKEND_ResponseSend(object response, uint32_t flags, error failed);
error TRITONBACKEND_StateNew(object* state, object request, const char* name, int datatype, const int64_t* shape,
                             uint32_t dims);
error TRITONBACKEND_StateBuffer(object state, void** buffer, uint64_t size, int* type, int64_t* id);
error TRITONBACKEND_StateUpdate(object state);

error TRITONBACKEND_RequestTrace(object request, object* trace);
error TRITONSERVER_InferenceTraceId(object trace, uint64_t* id);
error TRITONSERVER_InferenceTraceParentId(object trace, uint64_t* id);
error TRITONSERVER_InferenceTraceModelName(object trace, const char** name);
error TRITONSERVER_InferenceTraceModelVersion(object trace, int64_t* version);
error TRITONSERVER_InferenceTraceRequestId(object trace, const char** id);
error TRITONSERVER_InferenceTraceContext(object trace, const char** context);
error TRITONSERVER_InferenceTraceSetContext(object trace, const char* context);
error TRITONSERVER_InferenceTraceReportActivity(object trace, uint64_t ns, const char* name);
error TRITONSERVER_InferenceTraceSpawnChildTrace(object trace, object* child);
error TRITONSERVER_InferenceTraceDelete(object trace);
error TRITONSERVER_InferenceTraceNew(object* trace, int level, uint64_t parent, void (*activity)(object, int, uint64_t, void*),
                                     void (*released)(object, void*), void* with);
error TRITONSERVER_InferenceTraceTensorNew(object* trace, int level, uint64_t parent,
                                           void (*activity)(object, int, uint64_t, void*),
                                           void (*tensor)(object, int, const char*, int, const void*, size_t, const int64_t*,
                                                          uint64_t, int, int64_t, void*),
                                           void (*released)(object, void*), void* with);
error TRITONSERVER_ServerMetrics(object server, object* metrics);
error TRITONSERVER_MetricsFormatted(object metrics, int format, const char** base, size_t* size);
error TRITONSERVER_MetricsDelete(object metrics);

error TRITONSERVER_ServerIsReady(object server, bool* ready);
error TRITONSERVER_ServerMetadata(object server, object* message);
error TRITONSERVER_ServerModelMetadata(object server, const char* model, int64_t version, object* message);
error TRITONSERVER_ServerModelConfig(object server, const char* model, int64_t version, uint32_t format, object* message);
error TRITONSERVER_ServerModelStatistics(object server, const char* model, int64_t version, object* message);
error TRITONSERVER_ServerModelIndex(object server, uint32_t flags, object* message);
error TRITONSERVER_ServerModelBatchProperties(object server, const char* model, int64_t version, uint32_t* flags, void** with);
error TRITONSERVER_ResponseAllocatorSetQueryFunction(object allocator, void* query);
error TRITONSERVER_ResponseAllocatorSetBufferAttributesFunction(object allocator, void* attributes);
error TRITONSERVER_BufferAttributesByteSize(object attributes, size_t* size);
error TRITONSERVER_BufferAttributesMemoryType(object attributes, int* type);
error TRITONSERVER_BufferAttributesSetMemoryType(object attributes, int type);
error TRITONSERVER_ApiVersion(uint32_t* major, uint32_t* minor);
const char* TRITONSERVER_ErrorCodeString(error failed);
const char* TRITONSERVER_DataTypeString(int datatype);
uint32_t TRITONSERVER_DataTypeByteSize(int datatype);
int TRITONSERVER_StringToDataType(const char* name);
const char* TRITONSERVER_MemoryTypeString(int type);
const char* TRITONSERVER_ParameterTypeString(int type);
const char* TRITONSERVER_InstanceGroupKindString(int kind);
const char* TRITONSERVER_InferenceTraceLevelString(int level);
const char* TRITONSERVER_InferenceTraceActivityString(int activity);
bool TRITONSERVER_LogIsEnabled(int level);
object TRITONSERVER_ParameterBytesNew(const char* name, const void* data, uint64_t size);
error TRITONSERVER_BufferAttributesNew(object* attributes);
error TRITONSERVER_BufferAttributesDelete(object attributes);
error TRITONSERVER_BufferAttributesSetByteSize(object attributes, size_t size);
error TRITONSERVER_BufferAttributesSetMemoryTypeId(object attributes, int64_t id);
error TRITONSERVER_BufferAttributesSetCudaIpcHandle(object attributes, void* handle);
error TRITONSERVER_BufferAttributesMemoryTypeId(object attributes, int64_t* id);
error TRITONSERVER_BufferAttributesCudaIpcHandle(object attributes, void** handle);
error TRITONSERVER_GetMetricFamilyKind(object family, int* kind);
error TRITONSERVER_GetMetricKind(object metric, int* kind);
error TRITONSERVER_MetricArgsNew(object* arguments);
error TRITONSERVER_MetricArgsSetHistogram(object arguments, const double* buckets, uint64_t count);
error TRITONSERVER_MetricArgsDelete(object arguments);
error TRITONSERVER_MetricNewWithArgs(object* metric, object family, object* labels, uint64_t count, object arguments);
error TRITONSERVER_MetricObserve(object metric, double value);
error TRITONSERVER_MetricSet(object metric, double value);
error TRITONSERVER_MetricDelete(object metric);
error TRITONSERVER_MetricFamilyDelete(object family);
error TRITONBACKEND_BackendSetExecutionPolicy(object backend, int policy);
error TRITONBACKEND_BackendExecutionPolicy(object backend, int* policy);
error TRITONBACKEND_BackendAttributeSetParallelModelInstanceLoading(object attribute, bool enabled);
error TRITONBACKEND_ModelState(object model, void** state);
error TRITONBACKEND_ModelReportMemoryUsage(object model, object* usage, uint32_t count);
error TRITONBACKEND_ModelInstanceSetState(object instance, void* state);
error TRITONBACKEND_ModelInstanceState(object instance, void** state);
error TRITONBACKEND_ModelInstanceDeviceId(object instance, int32_t* device);
error TRITONBACKEND_ModelInstanceIsPassive(object instance, bool* passive);
error TRITONBACKEND_ModelInstanceHostPolicy(object instance, object* policy);
error TRITONBACKEND_ModelInstanceProfileCount(object instance, uint32_t* count);
error TRITONBACKEND_ModelInstanceProfileName(object instance, uint32_t index, const char** name);
error TRITONBACKEND_ModelInstanceSecondaryDeviceCount(object instance, uint32_t* count);
error TRITONBACKEND_ModelInstanceSecondaryDeviceProperties(object instance, uint32_t index, const char** kind, int64_t* id);
error TRITONBACKEND_ModelInstanceReportMemoryUsage(object instance, object* usage, uint32_t count);
error TRITONBACKEND_RequestCorrelationIdString(object request, const char** id);
error TRITONBACKEND_RequestInputName(object request, uint32_t index, const char** name);
error TRITONBACKEND_RequestOutputBufferProperties(object request, const char* name, size_t* size, int* type, int64_t* id);
error TRITONBACKEND_InputPropertiesForHostPolicy(object input, const char* policy, const char** name, int* datatype,
                                                 const int64_t** shape, uint32_t* dims, uint64_t* size, uint32_t* buffers);
error TRITONBACKEND_InputBufferForHostPolicy(object input, const char* policy, uint32_t index, const void** buffer,
                                             uint64_t* size, int* type, int64_t* id);
error TRITONBACKEND_InputBufferAttributes(object input, uint32_t index, const void** buffer, object* attributes);
error TRITONBACKEND_OutputBufferAttributes(object output, object* attributes);
error TRITONBACKEND_InferenceResponseOutput(object response, uint32_t index, const char** name, int* datatype,
                                            const int64_t** shape, uint64_t* dims);
error TRITONBACKEND_InferenceResponseOutputByName(object response, const char* name, int* datatype, const int64_t** shape,
                                                  uint64_t* dims);
error TRITONBACKEND_ResponseDelete(object response);
error TRITONBACKEND_ResponseFactoryIsCancelled(object factory, bool* cancelled);
error TRITONBACKEND_StateBufferAttributes(object state, object* attributes);
error TRITONSERVER_ServerIsLive(object server, bool* live);
error TRITONSERVER_ServerLoadModel(object server, const char* model);
error TRITONSERVER_ServerLoadModelWithParameters(object server, const char* model, object* parameters, uint64_t count);
error TRITONSERVER_ServerUnloadModel(object server, const char* model);
error TRITONSERVER_ServerUnloadModelAndDependents(object server, const char* model);
error TRITONSERVER_ResponseAllocatorDelete(object allocator);
error TRITONSERVER_InferenceRequestSetId(object call, const char* id);
error TRITONSERVER_InferenceRequestId(object call, const char** id);
error TRITONSERVER_InferenceRequestSetCorrelationId(object call, uint64_t id);
error TRITONSERVER_InferenceRequestSetCorrelationIdString(object call, const char* id);
error TRITONSERVER_InferenceRequestCorrelationId(object call, uint64_t* id);
error TRITONSERVER_InferenceRequestCorrelationIdString(object call, const char** id);
error TRITONSERVER_InferenceRequestSetFlags(object call, uint32_t flags);
error TRITONSERVER_InferenceRequestFlags(object call, uint32_t* flags);
error TRITONSERVER_InferenceRequestSetPriority(object call, uint32_t priority);
error TRITONSERVER_InferenceRequestPriority(object call, uint32_t* priority);
error TRITONSERVER_InferenceRequestSetPriorityUInt64(object call, uint64_t priority);
error TRITONSERVER_InferenceRequestPriorityUInt64(object call, uint64_t* priority);
error TRITONSERVER_InferenceRequestSetTimeoutMicroseconds(object call, uint64_t us);
error TRITONSERVER_InferenceRequestTimeoutMicroseconds(object call, uint64_t* us);
error TRITONSERVER_InferenceRequestSetStringParameter(object call, const char* name, const char* text);
error TRITONSERVER_InferenceRequestSetIntParameter(object call, const char* name, int64_t number);
error TRITONSERVER_InferenceRequestSetBoolParameter(object call, const char* name, bool truth);
error TRITONSERVER_InferenceRequestSetDoubleParameter(object call, const char* name, double number);
error TRITONSERVER_InferenceRequestRemoveInput(object call, const char* name);
error TRITONSERVER_InferenceRequestRemoveAllInputs(object call);
error TRITONSERVER_InferenceRequestRemoveAllInputData(object call, const char* name);
error TRITONSERVER_InferenceRequestAppendInputDataWithHostPolicy(object call, const char* name, const void* base, size_t size,
                                                                 int type, int64_t id, const char* policy);
error TRITONSERVER_InferenceRequestAppendInputDataWithBufferAttributes(object call, const char* name, const void* base,
                                                                       object attributes);
error TRITONSERVER_InferenceRequestAddRequestedOutput(object call, const char* name);
error TRITONSERVER_InferenceRequestRemoveRequestedOutput(object call, const char* name);
error TRITONSERVER_InferenceRequestRemoveAllRequestedOutputs(object call);
error TRITONSERVER_InferenceRequestIsCancelled(object call, bool* cancelled);
error TRITONSERVER_InferenceRequestCancel(object call);
error TRITONSERVER_InferenceResponseId(object response, const char** id);
error TRITONSERVER_InferenceResponseModel(object response, const char** name, int64_t* version);
error TRITONSERVER_InferenceResponseOutputCount(object response, uint32_t* count);
error TRITONSERVER_InferenceResponseParameterCount(object response, uint32_t* count);
error TRITONSERVER_InferenceResponseParameter(object response, uint32_t index, const char** name, int* type,
                                              const void** value);
