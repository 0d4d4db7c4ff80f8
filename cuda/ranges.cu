// Ranges that profilers show: NVTX, where its headers were found.

#include "outboard_cuda.h"

#ifdef OUTBOARD_CUDA_NVTX
#include <nvtx3/nvToolsExt.h>

extern "C" int outboard_cuda_has_ranges(void) { return 1; }

extern "C" void *outboard_cuda_range_domain(const char *name) { return nvtxDomainCreateA(name); }

extern "C" uint64_t outboard_cuda_range_begin(void *domain, const char *message) {
    nvtxEventAttributes_t attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = message;
    return nvtxDomainRangeStartEx(static_cast<nvtxDomainHandle_t>(domain), &attributes);
}

extern "C" void outboard_cuda_range_end(void *domain, uint64_t range) {
    nvtxDomainRangeEnd(static_cast<nvtxDomainHandle_t>(domain), range);
}
#else
extern "C" int outboard_cuda_has_ranges(void) { return 0; }
extern "C" void *outboard_cuda_range_domain(const char *) { return nullptr; }
extern "C" uint64_t outboard_cuda_range_begin(void *, const char *) { return 0; }
extern "C" void outboard_cuda_range_end(void *, uint64_t) {}
#endif
