#define LOADPROOF_NS amx
#define LOADPROOF_NAME "amx"
#define LOADPROOF_VEC 512
#define LOADPROOF_DOT 1
#define LOADPROOF_AMX 1
#include "level.inl"
