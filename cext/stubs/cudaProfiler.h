/* Some releases of cuda-bindings include this header for one type, and some CUDA packages lack it.
   Used only where the real one is missing (setup.py). */
#ifndef CUDA_PROFILER_H
#define CUDA_PROFILER_H
#include <cuda.h>
typedef enum CUoutput_mode_enum { CU_OUT_KEY_VALUE_PAIR = 0x00, CU_OUT_CSV = 0x01 } CUoutput_mode;
#endif
