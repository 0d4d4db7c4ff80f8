// What CUDA says about this machine, and about its own errors.

#include "outboard_cuda.h"

#include <cuda_runtime.h>

extern "C" int outboard_cuda_probe(int *devices, int *driver_version, int *runtime_version) {
    *devices = 0;
    *driver_version = 0;
    *runtime_version = 0;
    // The versions are known without a driver too; what the last call says is what matters.
    (void)cudaRuntimeGetVersion(runtime_version);
    (void)cudaDriverGetVersion(driver_version);
    const cudaError_t error = cudaGetDeviceCount(devices);
    if (error != cudaSuccess) *devices = 0;
    return error;
}

extern "C" const char *outboard_cuda_error_name(int error) {
    return cudaGetErrorName(static_cast<cudaError_t>(error));
}

extern "C" const char *outboard_cuda_error_string(int error) {
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}
