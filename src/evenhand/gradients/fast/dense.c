/* Models whose layers are matrices: lengths of rows, a last layer with few outputs, and cross-entropy, in few calls.

   A step of such a model is so short that asking torch for each of these costs as much as computing them. Lengths and
   losses are sums in double precision, so that none of them can overflow or vanish; products are float, as torch has
   them. All tables are rows after rows, without gaps. dense_native.py compares this with numpy before it is used. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define ROWS 4
#define OUTPUTS 5
#define COLUMNS 512
#define RUN 2048
#define BATCH 64
#define MOST 16 /* outputs of a narrow layer */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t masks __attribute__((vector_size(4 * LANES)));

INLINE floats floats_at(const float *p) {
    floats v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE float lanes(floats v) {
    float sum[LANES];
    memcpy(sum, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
    return sum[0];
}

INLINE double slow_square(const float *row, int64_t width) {
    double total = 0.0;
    for (int64_t j = 0; j < width; j++) total += (double)row[j] * row[j];
    return total;
}

/* In float, whose squares keep their digits in the middle of its range, and not for long, since roundings add up; a row
   that ends elsewhere is summed again. */
INLINE double square(const float *row, int64_t width) {
    if (width < 4 * LANES) return slow_square(row, width);
    double total = 0.0;
    int64_t j = 0;
    while (j + LANES <= width) {
        floats sum[4] = {{0}, {0}, {0}, {0}};
        int64_t stop = j + RUN < width ? j + RUN : width;
        for (; j + 4 * LANES <= stop; j += 4 * LANES)
            for (int k = 0; k < 4; k++) {
                floats v = floats_at(row + j + k * LANES);
                sum[k] += v * v;
            }
        for (; j + LANES <= stop; j += LANES) {
            floats v = floats_at(row + j);
            sum[0] += v * v;
        }
        total += lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    total += slow_square(row + j, width - j);
    return total >= 1e-25 && total <= 1e30 ? total : slow_square(row, width);
}

/* sqrt(sum over layers of |g|^2 (w |x|^2 + b)) for every row; w and b are 0 or 1. Returns how many exceed `most`. */
INLINE int64_t all_norms(int64_t layers, int64_t rows, const float *const *xs, const float *const *gs,
                         const int64_t *shape, double most, double *norm) {
    int64_t odd = 0;
    memset(norm, 0, (size_t)rows * sizeof *norm);
    for (int64_t l = 0; l < layers; l++, shape += 4)
        for (int64_t i = 0; i < rows; i++) {
            double g = square(gs[l] + i * shape[1], shape[1]);
            double x = shape[2] ? square(xs[l] + i * shape[0], shape[0]) : 0.0;
            norm[i] += g * (x + (double)shape[3]);
        }
    for (int64_t i = 0; i < rows; i++) {
        norm[i] = sqrt(norm[i]);
        odd += !(norm[i] <= most);
    }
    return odd;
}

static const int32_t edge[2 * LANES] = {[LANES... 2 * LANES - 1] = -1};

/* The last `count` numbers of a row, which begin at p, and zeros. */
INLINE floats tail(const float *p, int64_t count, int64_t width) {
    if (width < LANES) {
        float held[LANES] = {0};
        for (int64_t k = 0; k < count; k++) held[k] = p[k];
        return floats_at(held);
    }
    masks wanted;
    memcpy(&wanted, edge + count, sizeof wanted);
    return (floats)((masks)floats_at(p + count - LANES) & wanted);
}

/* Some outputs of four rows, which share what they load. */
INLINE void products(const float *x, int64_t rows, int64_t i, int64_t in, const float *w, const float *b, int64_t c,
                     const int count, float *out) {
    floats sum[ROWS][OUTPUTS] = {{{0}}}, value[ROWS];
    const float *own[ROWS], *to[OUTPUTS];
    for (int r = 0; r < ROWS; r++) own[r] = x + (i + r < rows ? i + r : i) * in;
    for (int k = 0; k < count; k++) to[k] = w + (c + k) * in;
    int64_t j = 0;
    for (; j + LANES <= in; j += LANES) {
        for (int r = 0; r < ROWS; r++) value[r] = floats_at(own[r] + j);
        for (int k = 0; k < count; k++) {
            floats weight = floats_at(to[k] + j);
            for (int r = 0; r < ROWS; r++) sum[r][k] += value[r] * weight;
        }
    }
    if (j < in) {
        for (int r = 0; r < ROWS; r++) value[r] = tail(own[r] + j, in - j, in);
        for (int k = 0; k < count; k++) {
            floats weight = tail(to[k] + j, in - j, in);
            for (int r = 0; r < ROWS; r++) sum[r][k] += value[r] * weight;
        }
    }
    for (int k = 0; k < count; k++)
        for (int r = 0; r < ROWS && i + r < rows; r++)
            out[(c + k) * rows + i + r] = lanes(sum[r][k]) + (b ? b[c + k] : 0.0f);
}

/* x w^T + b with one row per output. The number of outputs at a time must be known when this is compiled. */
INLINE void all_outputs(const float *x, int64_t rows, int64_t in, const float *w, const float *b, int64_t outs,
                        float *out) {
    for (int64_t i = 0; i < rows; i += ROWS)
        for (int64_t c = 0; c < outs; c += OUTPUTS) switch (outs - c) {
                case 1: products(x, rows, i, in, w, b, c, 1, out); break;
                case 2: products(x, rows, i, in, w, b, c, 2, out); break;
                case 3: products(x, rows, i, in, w, b, c, 3, out); break;
                case 4: products(x, rows, i, in, w, b, c, 4, out); break;
                default: products(x, rows, i, in, w, b, c, OUTPUTS, out);
            }
}

/* sum over rows of weight g^T x and of weight g, eight rows and some columns of x at a time, which stay in the cache. */
INLINE void all_sums(const float *x, const float *g, const double *weight, int64_t rows, int64_t in, int64_t outs,
                     float *w, float *b) {
    if (w) memset(w, 0, (size_t)(outs * in) * sizeof *w);
    if (b) memset(b, 0, (size_t)outs * sizeof *b);
    for (int64_t i = 0; i < rows; i += 8) {
        float scaled[MOST][8] = {{0}};
        for (int64_t k = 0; k < 8 && i + k < rows; k++)
            for (int64_t c = 0; c < outs; c++) {
                scaled[c][k] = (float)(weight[i + k] * g[(i + k) * outs + c]);
                if (b) b[c] += scaled[c][k];
            }
        for (int64_t start = 0; w && start < in; start += COLUMNS) {
            int64_t width = in - start < COLUMNS ? in - start : COLUMNS;
            const float *r[8];
            for (int64_t k = 0; k < 8; k++) r[k] = x + (i + k < rows ? i + k : i) * in + start;
            for (int64_t c = 0; c < outs; c++) {
                float *restrict to = w + c * in + start;
                const float *s = scaled[c];
                for (int64_t j = 0; j < width; j++)
                    to[j] += ((s[0] * r[0][j] + s[1] * r[1][j]) + (s[2] * r[2][j] + s[3] * r[3][j])) +
                             ((s[4] * r[4][j] + s[5] * r[5][j]) + (s[6] * r[6][j] + s[7] * r[7][j]));
            }
        }
    }
}

/* Every row times its weight, in place, and the sum of what comes out; eight rows at a time, which roundings like. */
INLINE void all_scaled(float *grad, const double *weight, int64_t rows, int64_t outs, float *restrict b) {
    memset(b, 0, (size_t)outs * sizeof *b);
    int64_t i = 0;
    for (; i + 8 <= rows; i += 8) {
        float *g = grad + i * outs, s[8];
        for (int k = 0; k < 8; k++) s[k] = (float)weight[i + k];
#pragma GCC ivdep
        for (int64_t c = 0; c < outs; c++) {
            float v[8];
            for (int k = 0; k < 8; k++) g[k * outs + c] = v[k] = s[k] * g[k * outs + c];
            b[c] += ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
        }
    }
    for (; i < rows; i++) {
        float *g = grad + i * outs, s = (float)weight[i];
#pragma GCC ivdep
        for (int64_t c = 0; c < outs; c++) b[c] += g[c] = s * g[c];
    }
}

/* Weights between 0 and what the sensitivity of a row's class allows for its norm, at most `most`; 0 where the weight is not
   finite or the norm not positive. Returns how many rows have none of the classes. */
INLINE int64_t all_bounded(const double *weight, const double *norm, const int64_t *owner, const double *sensitivity,
                           int64_t classes, int64_t rows, double most, double *out) {
    int64_t odd = 0;
    for (int64_t i = 0; i < rows; i++) {
        int known = owner[i] >= 0 && owner[i] < classes;
        double allowed = known ? sensitivity[owner[i]] / norm[i] : 0.0;
        odd += !known;
        allowed = weight[i] < allowed ? weight[i] : allowed;
        allowed = allowed < most ? allowed : most;
        out[i] = fabs(weight[i]) <= DBL_MAX && norm[i] > 0.0 && allowed > 0.0 ? allowed : 0.0;
    }
    return odd;
}

/* The gradient of what went into a ReLU, in place of that of what came out. */
INLINE void all_straight(float *restrict grad, const float *restrict out, int64_t count) {
    for (int64_t i = 0; i < count; i++) grad[i] = out[i] <= 0.0f ? 0.0f : grad[i];
}

/* exp(x) for x <= 0; what is below the smallest normal number is that. */
INLINE double exp_of(double x) {
    x = x < -708.0 ? -708.0 : x;
    double k = rint(x * 1.44269504088896340736);
    double r = (x - k * 6.93147180369123816490e-01) - k * 1.90821492927058770002e-10;
    double p = 1.0 / 479001600.0, shifted = k + (0x1p52 + 1023.0);
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits <<= 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* Cross-entropy and its slope at the outputs, which have one row per class; the slope has one row per record. Returns how
   many labels are none of the classes. */
INLINE int64_t all_slopes(const float *z, int64_t rows, int64_t classes, const int64_t *label, double *loss,
                          float *slope) {
    double top[BATCH], sum[BATCH], e[MOST][BATCH];
    int64_t odd = 0;
    for (int64_t start = 0; start < rows; start += BATCH) {
        int64_t n = rows - start < BATCH ? rows - start : BATCH;
        for (int64_t i = 0; i < n; i++) {
            top[i] = z[start + i];
            sum[i] = 0.0;
        }
        for (int64_t c = 1; c < classes; c++)
            for (int64_t i = 0; i < n; i++) {
                double value = z[c * rows + start + i];
                top[i] = value > top[i] ? value : top[i];
            }
        for (int64_t c = 0; c < classes; c++)
            for (int64_t i = 0; i < n; i++) {
                e[c][i] = exp_of(z[c * rows + start + i] - top[i]);
                sum[i] += e[c][i];
            }
        for (int64_t i = 0; i < n; i++) {
            int64_t own = label[start + i];
            float *to = slope + (start + i) * classes;
            if (own < 0 || own >= classes) {
                odd++;
                continue;
            }
            for (int64_t c = 0; c < classes; c++) to[c] = (float)(e[c][i] / sum[i]);
            to[own] = (float)(e[own][i] / sum[i] - 1.0);
            loss[start + i] = log(sum[i]) + (top[i] - z[own * rows + start + i]);
        }
    }
    return odd;
}

#define VARIANT(name, attribute)                                                                                       \
    attribute static int64_t norms_##name(int64_t l, int64_t r, const float *const *x, const float *const *g,          \
                                          const int64_t *s, double m, double *n) {                                     \
        return all_norms(l, r, x, g, s, m, n);                                                                         \
    }                                                                                                                  \
    attribute static void outputs_##name(const float *x, int64_t r, int64_t i, const float *w, const float *b,         \
                                         int64_t o, float *t) {                                                        \
        all_outputs(x, r, i, w, b, o, t);                                                                              \
    }                                                                                                                  \
    attribute static void sums_##name(const float *x, const float *g, const double *u, int64_t r, int64_t i,           \
                                      int64_t o, float *w, float *b) {                                                 \
        all_sums(x, g, u, r, i, o, w, b);                                                                              \
    }                                                                                                                  \
    attribute static int64_t slopes_##name(const float *z, int64_t r, int64_t c, const int64_t *y, double *l,          \
                                           float *s) {                                                                 \
        return all_slopes(z, r, c, y, l, s);                                                                           \
    }                                                                                                                  \
    attribute static int64_t bounded_##name(const double *w, const double *n, const int64_t *o, const double *s,       \
                                            int64_t c, int64_t r, double m, double *t) {                               \
        return all_bounded(w, n, o, s, c, r, m, t);                                                                    \
    }                                                                                                                  \
    attribute static void straight_##name(float *g, const float *o, int64_t n) { all_straight(g, o, n); }              \
    attribute static void scaled_##name(float *g, const double *w, int64_t r, int64_t o, float *b) {                   \
        all_scaled(g, w, r, o, b);                                                                                     \
    }

#include "simd_dispatch.h"

int64_t evenhand_norms(int64_t layers, int64_t rows, const float *const *xs, const float *const *gs,
                       const int64_t *shape, double most, double *norm) {
    return CHOOSE(norms, layers, rows, xs, gs, shape, most, norm);
}

void evenhand_outputs(const float *x, int64_t rows, int64_t in, const float *w, const float *b, int64_t outs,
                      float *out) {
    CHOOSE(outputs, x, rows, in, w, b, outs, out);
}

void evenhand_sums(const float *x, const float *g, const double *weight, int64_t rows, int64_t in, int64_t outs,
                   float *w, float *b) {
    CHOOSE(sums, x, g, weight, rows, in, outs, w, b);
}

int64_t evenhand_slopes(const float *z, int64_t rows, int64_t classes, const int64_t *label, double *loss,
                        float *slope) {
    return CHOOSE(slopes, z, rows, classes, label, loss, slope);
}

int64_t evenhand_bounded(const double *weight, const double *norm, const int64_t *owner, const double *sensitivity,
                         int64_t classes, int64_t rows, double most, double *out) {
    return CHOOSE(bounded, weight, norm, owner, sensitivity, classes, rows, most, out);
}

void evenhand_scaled(float *grad, const double *weight, int64_t rows, int64_t outs, float *sum) {
    CHOOSE(scaled, grad, weight, rows, outs, sum);
}

void evenhand_straight(float *grad, const float *out, int64_t count) { CHOOSE(straight, grad, out, count); }
