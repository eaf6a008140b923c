# interface.h, as host.pyx sees it; there stands what each function does.
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef extern from "interface.h":
    enum:
        COMPILED_FINE

    struct compiled_parameter:
        const char* name
        int type
        const char* string
        size_t size
        int64_t integer
        int boolean
        double number

    struct compiled_tensor:
        const char* name
        int datatype
        const int64_t* shape
        uint32_t dims
        const void* data
        size_t size
        void* token

    struct compiled_request:
        uint64_t key
        const char* id
        uint64_t correlation
        const char* correlation_text
        uint32_t flags
        uint64_t timeout_us
        int traced
        uint64_t trace
        uint64_t trace_parent
        const char* context
        compiled_tensor* inputs
        uint32_t input_count
        const char** outputs
        uint32_t output_count
        compiled_parameter* parameters
        uint32_t parameter_count
        int direct
        uint64_t handle

    struct compiled_times:
        uint64_t exec_start
        uint64_t compute_start
        uint64_t compute_end
        uint64_t exec_end

    struct compiled_stated:
        int said
        int success
        compiled_times times

    struct compiled_execution:
        uint64_t size
        compiled_times times

    struct compiled_response:
        int code
        const char* error
        uint32_t flags
        int null
        compiled_tensor* outputs
        uint32_t output_count
        compiled_parameter* parameters
        uint32_t parameter_count
        compiled_stated stated
        int later

    enum compiled_outcome:
        COMPILED_ANSWERED
        COMPILED_OPEN
        COMPILED_AGAIN
        COMPILED_LOST

    struct compiled_settled:
        compiled_outcome outcome
        int released
        compiled_response response
        compiled_stated stated

    struct compiled_call:
        uint64_t call
        const char* model
        int64_t version
        uint64_t trace_key
        const char* id
        uint64_t correlation
        const char* correlation_text
        uint32_t flags
        uint64_t timeout_us
        uint64_t priority
        compiled_tensor* inputs
        uint32_t input_count
        int raw
        const char** outputs
        uint32_t output_count
        compiled_parameter* parameters
        uint32_t parameter_count
        int timed

    enum:
        COMPILED_STAGES

    struct compiled_passed:
        uint64_t stages[COMPILED_STAGES]
        int64_t version

    struct compiled_durations:
        uint32_t place
        int outcome
        uint64_t computing_ns
        uint64_t output_ns

    struct compiled_memory:
        int type
        int64_t id
        uint64_t size

    struct compiled_host:
        int (*respond)(uint64_t, const compiled_response*, char*, size_t) noexcept with gil
        void (*released)(uint64_t) noexcept with gil
        void (*forgotten)(uint64_t, const compiled_stated*) noexcept with gil
        void (*stated)(uint64_t, const compiled_stated*) noexcept with gil
        void (*activity)(uint64_t, uint64_t, const char*) noexcept with gil
        void (*executed)(const compiled_execution*) noexcept with gil
        int (*cancelled)(uint64_t) noexcept with gil
        size_t shared_above
        void* (*allocate)(size_t, void**) noexcept with gil
        void (*unused)(void*) noexcept with gil
        void (*log)(int, const char*, int, const char*) noexcept with gil
        const volatile unsigned char* shown
        void (*memory)(const compiled_memory*, uint32_t) noexcept with gil
        void (*measured)(const compiled_durations*) noexcept with gil
        int (*family)(int, const char*, const char*, uint64_t*, char*, size_t) noexcept with gil
        int (*metric)(uint64_t, const compiled_parameter*, uint32_t, const double*, uint32_t, int, uint64_t*, char*,
                      size_t) noexcept with gil
        int (*change)(uint64_t, int, double, double*, char*, size_t) noexcept with gil
        void (*forget_metric)(uint64_t) noexcept with gil
        int (*infer)(const compiled_call*, char*, size_t) noexcept with gil
        void (*cancel_call)(uint64_t) noexcept with gil
        int (*load)(const char*, const compiled_parameter*, uint32_t, char*, size_t) noexcept with gil
        int (*unload)(const char*, int, char*, size_t) noexcept with gil
        int (*ready)(const char*, int64_t, int*, char*, size_t) noexcept with gil
        int (*labels)(const char*, int64_t, const char*, void (*)(void*, const char*, size_t) noexcept nogil, void*, char*,
                      size_t) noexcept with gil
        int (*describe)(int, const char*, int64_t, void (*)(void*, const char*, size_t) noexcept nogil, void*, char*,
                        size_t) noexcept with gil
        int (*decoupled)(const char*, int64_t, int*, char*, size_t) noexcept with gil

    struct compiled_start:
        const char* library
        const char* folder
        const char* backend
        const char* backend_config
        const char* model
        uint64_t version
        const char* repository
        const char* config
        int auto_complete
        const char* strategy

    struct compiled_instance:
        const char* name
        int kind
        int32_t device
        const char* host_policy
        int passive
        const char** profiles
        uint32_t profile_count
        const char** secondary_kinds
        const int64_t* secondary_ids
        uint32_t secondary_count

    struct compiled_group:
        int kind
        uint64_t count

    struct compiled_manner:
        int device_blocking
        int parallel_loading

    struct compiled_library:
        void (*hosted)(const compiled_host*) noexcept nogil
        int (*begin)(const compiled_start*, char*, size_t) noexcept nogil
        const char* (*config)() noexcept nogil
        uint32_t (*groups)(compiled_group*, uint32_t) noexcept nogil
        void (*manner)(compiled_manner*) noexcept nogil
        int (*instance)(const compiled_instance*, char*, size_t) noexcept nogil
        int (*ready)(char*, size_t) noexcept nogil
        uint32_t (*together)(compiled_request*, uint32_t) noexcept nogil
        int (*execute)(compiled_request*, uint32_t, const compiled_execution**, uint32_t*, char*, size_t) noexcept nogil
        int (*waits)(uint64_t) noexcept nogil
        void (*settle)(uint64_t, compiled_settled*) noexcept nogil
        void (*dropped)(uint64_t) noexcept nogil
        void (*carried)(uint64_t) noexcept nogil
        void (*deliver)(uint64_t, const compiled_response*, int, const compiled_passed*) noexcept nogil
        void (*finish)(char*, size_t) noexcept nogil
