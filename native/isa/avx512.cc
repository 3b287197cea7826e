#define LOADPROOF_NS avx512
#define LOADPROOF_NAME "avx512"
#define LOADPROOF_VEC 512
#define LOADPROOF_DOT 0
#define LOADPROOF_AMX 0
#include "level.inl"
