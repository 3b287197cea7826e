// The body of every isa/<level>.cc, after its macros: all kernels compiled for one level, and their table.

#include <cassert>

// Each file builds on those before it.
// clang-format off
#include "../kernels.h"
#include "vec16.h"
#if LOADPROOF_AMX
#include "matmul_amx.inl"
#else
#include "matmul_dot.inl"
#endif
#include "ops.inl"
#include "attention.inl"
#include "sample.inl"
// clang-format on

namespace loadproof::LOADPROOF_NS {

extern const Kernels kKernels;
const Kernels kKernels = {LOADPROOF_NAME, begin_thread, end_thread, embed,      norm,
                          linear,         qkv,          attention,  sample_row, score_row};

}  // namespace loadproof::LOADPROOF_NS
