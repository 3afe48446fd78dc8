/* Functions that engraft never calls: naming one is a compile error. */
#ifndef ENGRAFT_BASE_BANNED_H
#define ENGRAFT_BASE_BANNED_H

/* The system headers that declare them must come first. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* nvcc's own headers name some of them after this one. */
#if defined(__GNUC__) && !defined(ENGRAFT_ALLOW_BANNED) && !defined(__CUDACC__)
#pragma GCC poison strcpy strcat sprintf vsprintf strtok atoi atol atof alloca rand srand gets
#endif

#endif
