/* Standard normals from random bits, and sums that leave with them on a grid.

   The numbers of normals.py and releasing.py, but for the last bits of log, sin and cos: Box-Muller in double precision
   from 53 bits each for radius and angle. In a block of 1024 the first half of the words is for radii and the second for
   angles, the first half of the normals are cosines and the second sines. No table, no branch on a random number.
   compiled.py loads this and compares it with numpy before it is used. */
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

INLINE int64_t add(const float *restrict total, const double *restrict normals, float *restrict out, int64_t count,
                   double inverse, double alpha, double scale) {
    int64_t odd = 0;
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

INLINE int64_t all_parts(const uint64_t *words, int64_t first, int64_t last, const float *const *totals,
                         float *const *outs, const int64_t *ends, double inverse, double alpha, double scale) {
    double normals[BLOCK];
    int64_t odd = 0, part = 0;
    for (int64_t block = first; block < last; block += BLOCK, words += BLOCK) {
        int64_t stop = block + BLOCK < last ? block + BLOCK : last;
        block_normals(words, normals);
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
    attribute static int64_t release_##name(const uint64_t *w, int64_t f, int64_t l, const float *const *t,            \
                                            float *const *o, const int64_t *e, double i, double a, double s) {         \
        return all_parts(w, f, l, t, o, e, i, a, s);                                                                   \
    }

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

/* 1024 * blocks normals from as many words. */
void evenhand_normals(const uint64_t *words, double *out, int64_t blocks) { CHOOSE(normals, words, out, blocks); }

/* The numbers first .. last - 1 of a sum that lies in parts, `ends` counting over all of them: rounded to the grid, noise
   added, rounded again, scaled. `first` is a multiple of 1024, and `words` begins with its block and ends with a whole
   one. Returns how many numbers of the sum were not finite; if any, nothing of `outs` may leave. */
int64_t evenhand_release(const uint64_t *words, int64_t first, int64_t last, const float *const *totals,
                         float *const *outs, const int64_t *ends, double inverse, double alpha, double scale) {
    return CHOOSE(release, words, first, last, totals, outs, ends, inverse, alpha, scale);
}
