/* Standard normals from random bits, and sums that leave with them on a grid.

   The numbers of normals.py and releasing.py, but for the last bits of log, sin and cos: Box-Muller in double precision
   from 53 bits each for radius and angle. In a block of 1024 the first half of the words is for radii and the second for
   angles, the first half of the normals are cosines and the second sines. No table, no branch on a random number.

   The bits are AES-256 in counter mode, as streams.py has them from OpenSSL: given, or made here by the processor's own
   instructions, a block at a time, so that they never leave its cache.
   noise_native.py loads this and compares it with numpy and OpenSSL before it is used. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 1024
#define HALF (BLOCK / 2)
#define INLINE static inline __attribute__((always_inline))
#define TWO_52 0x1p52

INLINE double from_bits(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint64_t to_bits(double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The upper 53 bits of a word (read as signed, plus 2^63) as a whole number from 0 to 2^53 - 1, exactly. */
INLINE double upper(uint64_t word) {
    uint64_t k = (word ^ 0x8000000000000000u) >> 11;
    double high = from_bits((k >> 32) | 0x4530000000000000u) - (0x1p84 + TWO_52);
    return high + from_bits((k & 0xffffffffu) | 0x4330000000000000u);
}

/* sqrt(-2 ln(x / 2^53)) for whole x from 1 to 2^53. */
INLINE double radius_of(double x) {
    uint64_t bits = to_bits(x), exponent = (bits - 0x3fe6a09e667f3bcdu) >> 52;
    double m = from_bits(bits - (exponent << 52)); /* from sqrt(1/2) to sqrt(2) */
    double e = from_bits(exponent | 0x4330000000000000u) - (TWO_52 + 53.0);
    double f = m - 1.0, s = f / (2.0 + f), z = s * s, h = 0.5 * f * f;
    double p = 1.479819860511658591e-01;
    p = p * z + 1.531383769920937332e-01;
    p = p * z + 1.818357216161805012e-01;
    p = p * z + 2.222219843214978396e-01;
    p = p * z + 2.857142874366239149e-01;
    p = p * z + 3.999999999940941908e-01;
    p = p * z + 6.666666666666735130e-01;
    double low = s * (h + z * p) + e * 1.90821492927058770002e-10;
    double log = e * 6.93147180369123816490e-01 - ((h - low) - f);
    return sqrt(-2.0 * log);
}

INLINE void block_normals(const uint64_t *restrict words, double *restrict out) {
    for (int i = 0; i < HALF; i++) {
        double radius = radius_of(upper(words[i]) + 1.0);
        double turns = upper(words[HALF + i]) * 0x1p-53 - 0.5;
        double quarter = rint(4.0 * turns);
        double a = (turns - 0.25 * quarter) * 6.283185307179586477, z = a * a; /* at most an eighth of a turn */
        double s = 1.58969099521155010221e-10;
        s = s * z - 2.50507602534068634195e-08;
        s = s * z + 2.75573137070700676789e-06;
        s = s * z - 1.98412698298579493134e-04;
        s = s * z + 8.33333333332248946124e-03;
        s = s * z - 1.66666666666666324348e-01;
        s = a + a * z * s;
        double c = -1.13596475577881948265e-11;
        c = c * z + 2.08757232129817482790e-09;
        c = c * z - 2.75573143513906633035e-07;
        c = c * z + 2.48015872894767294178e-05;
        c = c * z - 1.38888888888741095749e-03;
        c = c * z + 4.16666666666666019037e-02;
        c = 1.0 - (0.5 * z - z * z * c);
        uint64_t q = to_bits(quarter + 0x1.8p52), odd = 0 - (q & 1), su = to_bits(s), cu = to_bits(c);
        double cosine = from_bits(((cu & ~odd) | (su & odd)) ^ (((q + 1) & 2) << 62));
        double sine = from_bits(((su & ~odd) | (cu & odd)) ^ ((q & 2) << 62));
        out[i] = radius * cosine;
        out[HALF + i] = radius * sine;
    }
}

/* `out` may be `total` itself: every number is read before it is written. */
INLINE int64_t add(const float *total, const double *restrict normals, float *out, int64_t count, double inverse,
                   double alpha, double scale) {
    int64_t odd = 0;
#pragma GCC ivdep
    for (int64_t i = 0; i < count; i++) {
        double whole = rint((double)total[i] * inverse);
        odd += !(fabs(whole) <= DBL_MAX);
        out[i] = (float)(rint(whole + normals[i] * alpha) * scale);
    }
    return odd;
}

/* By way of memory of its own, since words and normals may be the same place. */
INLINE void all_normals(const uint64_t *words, double *out, int64_t blocks) {
    double made[BLOCK];
    for (int64_t b = 0; b < blocks; b++) {
        block_normals(words + b * BLOCK, made);
        memcpy(out + b * BLOCK, made, sizeof made);
    }
}

/* Where the bits come from: `words`, or the key stream of a step. */
typedef struct {
    const uint64_t *words;
    const void *keys;
    uint64_t step;
    void (*encrypt)(const void *keys, uint64_t step, uint64_t first, uint64_t *words);
} bits;

INLINE int64_t all_parts(bits from, int64_t first, int64_t last, const float *const *totals, float *const *outs,
                         const int64_t *ends, double inverse, double alpha, double scale) {
    double normals[BLOCK];
    uint64_t made[BLOCK];
    int64_t odd = 0, part = 0;
    for (int64_t block = first; block < last; block += BLOCK) {
        int64_t stop = block + BLOCK < last ? block + BLOCK : last;
        if (from.words == NULL) from.encrypt(from.keys, from.step, (uint64_t)block / 2, made);
        block_normals(from.words == NULL ? made : from.words + (block - first), normals);
        for (int64_t place = block; place < stop;) {
            while (ends[part] <= place) part++;
            int64_t until = ends[part] < stop ? ends[part] : stop, own = place - (part ? ends[part - 1] : 0);
            odd += add(totals[part] + own, normals + (place - block), outs[part] + own, until - place, inverse, alpha,
                       scale);
            place = until;
        }
    }
    return odd;
}

#define VARIANT(name, attribute)                                                                                       \
    attribute static void normals_##name(const uint64_t *w, double *o, int64_t b) { all_normals(w, o, b); }            \
    attribute static int64_t release_##name(bits b, int64_t f, int64_t l, const float *const *t, float *const *o,      \
                                            const int64_t *e, double i, double a, double s) {                          \
        return all_parts(b, f, l, t, o, e, i, a, s);                                                                   \
    }

#include "simd_dispatch.h"

/* 1024 * blocks normals from as many words. */
void evenhand_normals(const uint64_t *words, double *out, int64_t blocks) { CHOOSE(normals, words, out, blocks); }

/* The numbers first .. last - 1 of a sum that lies in parts, `ends` counting over all of them: rounded to the grid, noise
   added, rounded again, scaled. `first` is a multiple of 1024, and `words` begins with its block and ends with a whole
   one. Returns how many numbers of the sum were not finite; if any, nothing of `outs` may leave. */
int64_t evenhand_release(const uint64_t *words, int64_t first, int64_t last, const float *const *totals,
                         float *const *outs, const int64_t *ends, double inverse, double alpha, double scale) {
    bits from = {words, NULL, 0, NULL};
    return CHOOSE(release, from, first, last, totals, outs, ends, inverse, alpha, scale);
}

#if defined(__x86_64__)
#include <immintrin.h>
#define AES __attribute__((target("aes,sse4.1,ssse3")))
#define VAES __attribute__((target("aes,vaes,avx512f,avx512bw")))
#define ROUNDS 14
#define SHARE (8 * BLOCK)

AES static inline __m128i spread(__m128i key, __m128i assist) {
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, assist);
}

/* The round keys of AES-256 (FIPS 197, section 5.2). */
AES static void expand(const uint8_t *key, __m128i *keys) {
    keys[0] = _mm_loadu_si128((const __m128i *)key);
    keys[1] = _mm_loadu_si128((const __m128i *)(key + 16));
#define EVEN(i, constant)                                                                                              \
    keys[i] = spread(keys[i - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[i - 1], constant), 0xff))
#define ODD(i) keys[i] = spread(keys[i - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(keys[i - 1], 0), 0xaa))
    EVEN(2, 1), ODD(3), EVEN(4, 2), ODD(5), EVEN(6, 4), ODD(7), EVEN(8, 8), ODD(9);
    EVEN(10, 16), ODD(11), EVEN(12, 32), ODD(13), EVEN(14, 64);
}

/* A block of words: 512 counters, each the step and then the place, both with the highest byte first. */
AES static void encrypt_aes(const void *held, uint64_t step, uint64_t first, uint64_t *words) {
    const __m128i *keys = held;
    for (uint64_t i = 0; i < BLOCK / 2; i += 8) {
        __m128i block[8];
        for (int k = 0; k < 8; k++) {
            uint64_t place = __builtin_bswap64(first + i + (uint64_t)k);
            block[k] = _mm_xor_si128(_mm_set_epi64x((long long)place, (long long)__builtin_bswap64(step)), keys[0]);
        }
        for (int round = 1; round < ROUNDS; round++)
            for (int k = 0; k < 8; k++) block[k] = _mm_aesenc_si128(block[k], keys[round]);
        for (int k = 0; k < 8; k++)
            _mm_storeu_si128((__m128i *)(words + 2 * i) + k, _mm_aesenclast_si128(block[k], keys[ROUNDS]));
    }
}

#if defined(__clang__) || __GNUC__ >= 11 /* older ones do not know how to ask for it */
#define HAS_VAES (__builtin_cpu_supports("vaes") && __builtin_cpu_supports("avx512bw"))
/* The same, four counters at a time. */
VAES static void encrypt_vaes(const void *held, uint64_t step, uint64_t first, uint64_t *words) {
    const __m128i *keys = held;
    const __m512i turn = _mm512_broadcast_i32x4(_mm_set_epi64x(0x08090a0b0c0d0e0f, 0x0001020304050607));
    const __m512i four = _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0);
    long long s = (long long)step, p = (long long)first;
    __m512i counter = _mm512_set_epi64(p + 3, s, p + 2, s, p + 1, s, p, s);
    for (int i = 0; i < BLOCK / 8; i += 8) {
        __m512i block[8], key = _mm512_broadcast_i32x4(keys[0]);
        for (int k = 0; k < 8; k++) {
            block[k] = _mm512_xor_si512(_mm512_shuffle_epi8(counter, turn), key);
            counter = _mm512_add_epi64(counter, four);
        }
        for (int round = 1; round < ROUNDS; round++) {
            key = _mm512_broadcast_i32x4(keys[round]);
            for (int k = 0; k < 8; k++) block[k] = _mm512_aesenc_epi128(block[k], key);
        }
        key = _mm512_broadcast_i32x4(keys[ROUNDS]);
        for (int k = 0; k < 8; k++) _mm512_storeu_si512(words + 8 * (i + k), _mm512_aesenclast_epi128(block[k], key));
    }
}
#else
#define HAS_VAES 0
#define encrypt_vaes encrypt_aes
#endif

/* Where the bits of a step come from, with its round keys in `keys`. */
AES static bits stream_of(const uint8_t *key, uint64_t step, __m128i *keys) {
    expand(key, keys);
    bits from = {NULL, keys, step, HAS_VAES ? encrypt_vaes : encrypt_aes};
    return from;
}

AES static void wipe(__m128i *keys) {
    memset(keys, 0, (ROUNDS + 1) * sizeof *keys);
    __asm__ volatile("" : : "r"(keys) : "memory"); /* so that it is really done */
}

/* A sum whose noise several threads add; each takes the next few blocks until there are none. */
typedef struct {
    bits from;
    int64_t next, last, odd, done;
    const float *const *totals;
    float *const *outs;
    const int64_t *ends;
    double inverse, alpha, scale;
} task;

static void work(void *given) {
    task *t = given;
    for (;;) {
        int64_t first = __atomic_fetch_add(&t->next, SHARE, __ATOMIC_RELAXED);
        if (first >= t->last) return;
        int64_t last = first + SHARE < t->last ? first + SHARE : t->last;
        int64_t odd = CHOOSE(release, t->from, first, last, t->totals, t->outs, t->ends, t->inverse, t->alpha, t->scale);
        __atomic_fetch_add(&t->odd, odd, __ATOMIC_RELAXED);
        __atomic_fetch_add(&t->done, last - first, __ATOMIC_RELAXED);
    }
}

int64_t evenhand_encrypts(void) { return __builtin_cpu_supports("aes") != 0; }

/* As evenhand_release for a whole sum, with the bits of a key of 32 bytes; `step` is the upper half of a counter. `team`
   runs a function in several threads at once (OpenMP's GOMP_parallel), or is NULL. Returns -1 if it did not do it all. */
AES int64_t evenhand_encrypted(const uint8_t *key, uint64_t step, int64_t last, const float *const *totals,
                               float *const *outs, const int64_t *ends, double inverse, double alpha, double scale,
                               void (*team)(void (*)(void *), void *, unsigned, unsigned), unsigned threads) {
    __m128i keys[ROUNDS + 1];
    bits from = stream_of(key, step, keys);
    task all = {from, 0, last, 0, 0, totals, outs, ends, inverse, alpha, scale};
    if (team != NULL)
        team(work, &all, threads, 0);
    else
        work(&all);
    wipe(keys);
    return all.done == last ? all.odd : -1;
}

/* As evenhand_normals, from the bits of a key; `first` is the number of the first block. */
AES void evenhand_keyed(const uint8_t *key, uint64_t step, int64_t first, int64_t blocks, double *out) {
    __m128i keys[ROUNDS + 1];
    bits from = stream_of(key, step, keys);
    for (int64_t b = 0; b < blocks; b++, out += BLOCK) {
        uint64_t made[BLOCK];
        from.encrypt(keys, step, (uint64_t)(first + b) * (BLOCK / 2), made);
        CHOOSE(normals, made, out, 1);
    }
    wipe(keys);
}
#else
int64_t evenhand_encrypts(void) { return 0; }
int64_t evenhand_encrypted(void) { return -1; }
void evenhand_keyed(void) {}
#endif
