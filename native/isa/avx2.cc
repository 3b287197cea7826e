#define LOADPROOF_NS avx2
#define LOADPROOF_NAME "avx2"
#define LOADPROOF_VEC 256
#define LOADPROOF_DOT 0
#define LOADPROOF_AMX 0
#include "level.inl"
