#define LOADPROOF_NS avx512_bf16
#define LOADPROOF_NAME "avx512_bf16"
#define LOADPROOF_VEC 512
#define LOADPROOF_DOT 1
#define LOADPROOF_AMX 0
#include "level.inl"
