# ONNX Runtime's C ABI: the functions in use, which are taken from the library's table when it is loaded. Every object
# of the library is a void* here. A status is NULL on success; whoever gets another one must release it (failure() does).
from libc.stdint cimport int64_t, uint32_t

ctypedef void* Status
ctypedef void (*Log)(void* param, int severity, const char* category, const char* id,
                     const char* where, const char* message) noexcept nogil

cdef struct Feed:            # an input, as it is passed to a session
    int slot                 # the index of the session's input
    const char* data
    size_t nbytes
    const int64_t* dims
    size_t rank

cdef struct Ort:
    Status (*create_status)(int code, const char* message) noexcept nogil
    int (*error_code)(const void* status) noexcept nogil
    const char* (*error_message)(const void* status) noexcept nogil
    void (*release_status)(void* status) noexcept nogil
    Status (*create_env)(Log log, void* param, int severity, const char* id, void** env) noexcept nogil
    Status (*create_session)(void* env, const char* path, void* options, void** session) noexcept nogil
    Status (*create_session_from)(void* env, const void* model, size_t nbytes, void* options,
                                  void** session) noexcept nogil
    void (*release_session)(void* session) noexcept nogil
    Status (*run)(void* session, void* options, const char** input_names, void** inputs, size_t n_inputs,
                  const char** output_names, size_t n_outputs, void** outputs) noexcept nogil
    Status (*create_options)(void** options) noexcept nogil
    void (*release_options)(void* options) noexcept nogil
    Status (*save_optimised)(void* options, const char* path) noexcept nogil
    Status (*set_execution_mode)(void* options, int mode) noexcept nogil
    Status (*enable_mem_pattern)(void* options) noexcept nogil
    Status (*disable_mem_pattern)(void* options) noexcept nogil
    Status (*enable_arena)(void* options) noexcept nogil
    Status (*disable_arena)(void* options) noexcept nogil
    Status (*set_log_severity)(void* options, int severity) noexcept nogil
    Status (*set_optimization)(void* options, int level) noexcept nogil
    Status (*set_intra_threads)(void* options, int count) noexcept nogil
    Status (*set_inter_threads)(void* options, int count) noexcept nogil
    Status (*add_config_entry)(void* options, const char* key, const char* value) noexcept nogil
    Status (*register_library)(void* options, const char* path) noexcept nogil
    Status (*input_count)(const void* session, size_t* n) noexcept nogil
    Status (*output_count)(const void* session, size_t* n) noexcept nogil
    Status (*initializer_count)(const void* session, size_t* n) noexcept nogil
    Status (*input_type)(const void* session, size_t i, void** info) noexcept nogil
    Status (*output_type)(const void* session, size_t i, void** info) noexcept nogil
    Status (*initializer_type)(const void* session, size_t i, void** info) noexcept nogil
    Status (*input_name)(const void* session, size_t i, void* allocator, char** name) noexcept nogil
    Status (*output_name)(const void* session, size_t i, void* allocator, char** name) noexcept nogil
    Status (*initializer_name)(const void* session, size_t i, void* allocator, char** name) noexcept nogil
    void (*release_type)(void* info) noexcept nogil
    Status (*kind_of_type)(const void* info, int* kind) noexcept nogil
    Status (*tensor_of_type)(const void* info, const void** tensor) noexcept nogil
    Status (*sequence_of_type)(const void* info, const void** sequence) noexcept nogil
    Status (*sequence_element)(const void* sequence, void** info) noexcept nogil
    Status (*map_of_type)(const void* info, const void** map) noexcept nogil
    Status (*map_key)(const void* map, int* element) noexcept nogil
    Status (*map_value)(const void* map, void** info) noexcept nogil
    Status (*optional_of_type)(const void* info, const void** optional) noexcept nogil
    Status (*optional_content)(const void* optional, void** info) noexcept nogil
    Status (*element_type)(const void* tensor, int* element) noexcept nogil
    Status (*rank)(const void* tensor, size_t* rank) noexcept nogil
    Status (*dimensions)(const void* tensor, int64_t* dims, size_t rank) noexcept nogil
    Status (*symbols)(const void* tensor, const char** names, size_t rank) noexcept nogil
    Status (*create_tensor)(void* allocator, const int64_t* dims, size_t rank, int element,
                            void** value) noexcept nogil
    Status (*create_tensor_over)(const void* memory, void* data, size_t nbytes, const int64_t* dims,
                                 size_t rank, int element, void** value) noexcept nogil
    Status (*is_tensor)(const void* value, int* yes) noexcept nogil
    Status (*tensor_data)(void* value, void** data) noexcept nogil
    Status (*tensor_shape)(const void* value, void** tensor) noexcept nogil
    void (*release_tensor_shape)(void* tensor) noexcept nogil
    void (*release_value)(void* value) noexcept nogil
    Status (*strings_length)(const void* value, size_t* nbytes) noexcept nogil
    Status (*strings)(const void* value, void* data, size_t nbytes, size_t* offsets, size_t n) noexcept nogil
    Status (*string_buffer)(void* value, size_t i, size_t nbytes, char** buffer) noexcept nogil
    Status (*create_memory_info)(int allocator, int memory, void** info) noexcept nogil
    Status (*default_allocator)(void** allocator) noexcept nogil
    Status (*free_memory)(void* allocator, void* p) noexcept nogil

cdef Ort ort
cdef void* env               # the library's environment; one per process, never released
cdef void* cpu_memory        # the library's name for ordinary host memory
cdef void* allocator

cdef int datatype_of(int element) noexcept nogil   # the protocol's datatype; 0 when it has none
cdef int element_of(int dtype) noexcept nogil
cdef object failure(Status status)                 # an OrtError; releases the status
cdef int check(Status status) except -1            # raises failure() unless the status is NULL
