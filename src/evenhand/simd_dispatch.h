/* Compile functions for several instruction sets, and choose among them when they are called.

   Before this file is included, VARIANT(name, attribute) must be defined: it defines a static function what_##name with
   the given attribute for every `what`. CHOOSE(what, ...) then calls the widest variant that the processor has. */
VARIANT(plain, )
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2,fma"))))
#if defined(__clang__)
#define WIDE "avx512f,avx512dq,avx512vl,fma"
#else
#define WIDE "avx512f,avx512dq,avx512vl,fma,prefer-vector-width=512"
#endif
VARIANT(avx512, __attribute__((target(WIDE))))
#define CHOOSE(what, ...)                                                                                              \
    (__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") ? what##_avx512(__VA_ARGS__)             \
     : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")        ? what##_avx2(__VA_ARGS__)               \
                                                                              : what##_plain(__VA_ARGS__))
#else
#define CHOOSE(what, ...) what##_plain(__VA_ARGS__)
#endif
