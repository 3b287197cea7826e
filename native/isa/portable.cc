#define LOADPROOF_NS portable
#define LOADPROOF_NAME "portable"
#define LOADPROOF_VEC 0
#define LOADPROOF_DOT 0
#define LOADPROOF_AMX 0
#include "level.inl"
