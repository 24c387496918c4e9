/* One step of an LSTM between its matrix products, forward and back: one walk over the gates instead of ten. And norms
   of records' gradients from Gram matrices over time.

   Gates are output, input, forget, new, side by side for each record. sigmoid and tanh are float, good to a few units of
   rounding. lstm_native.py compares this with torch before it is used. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define SHARE 32 /* rows that a thread takes at a time */
#define LANES 8
#define TILE 4    /* times by times whose products are summed in registers */
#define MOST 32   /* times */
#define PIECE 128 /* columns of all times that are worked on at once: they stay in the nearest cache */
#define RUN 512   /* columns that are summed in float: roundings add up */
#define TILES (MOST / TILE * (MOST / TILE + 1) / 2)

/* exp(x) (Cephes' expf, without branches), from exp(-87) to exp(88). */
INLINE float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float k = rintf(x * 1.44269504088896341f);
    float r = x - k * 0.693359375f - k * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)k + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

INLINE float sigmoid_of(float x) { return 1.0f / (1.0f + exp_of(-x)); }

/* Near zero a polynomial (Cephes' tanhf), where the quotient would lose digits. */
INLINE float tanh_of(float x) {
    float z = x * x, p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    float near = p * z * x + x, far = 1.0f - 2.0f / (1.0f + exp_of(2.0f * x));
    return fabsf(x) < 0.625f ? near : far;
}

/* Gates become slopes: of the state by the output gate, of the cell by the others. The state goes where states are. */
INLINE void forward_row(float *restrict gates, float *restrict cell, float *restrict state, float *restrict through,
                        float *restrict forget, int64_t width) {
    for (int64_t j = 0; j < width; j++) {
        float o = sigmoid_of(gates[j]), i = sigmoid_of(gates[width + j]), f = sigmoid_of(gates[2 * width + j]);
        float new = tanh_of(gates[3 * width + j]), before = cell[j];
        float after = f * before + i * new, tanh = tanh_of(after), h = o * tanh;
        gates[j] = tanh * (o * (1.0f - o));
        gates[width + j] = new * (i * (1.0f - i));
        gates[2 * width + j] = before * (f * (1.0f - f));
        gates[3 * width + j] = i - i * new * new;
        through[j] = o - h * tanh;
        forget[j] = f;
        state[j] = h;
        cell[j] = after;
    }
}

/* Slopes become gradients of the gates; the gradient of the cell goes on to the time before. */
INLINE void back_row(float *restrict slopes, float *restrict cell, const float *restrict state,
                     const float *restrict through, const float *restrict forget, int64_t width) {
    for (int64_t j = 0; j < width; j++) {
        float c = cell[j] + state[j] * through[j];
        slopes[j] *= state[j];
        slopes[width + j] *= c;
        slopes[2 * width + j] *= c;
        slopes[3 * width + j] *= c;
        cell[j] = c * forget[j];
    }
}

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));

INLINE double lanes(floats v) {
    doubles all = __builtin_convertvector(v, doubles);
    for (int width = LANES / 2; width; width /= 2)
        for (int k = 0; k < width; k++) all[k] += all[k + width];
    return all[0];
}

/* A table (rows, times, width) whose rows and times are so many numbers apart. */
typedef struct {
    const float *at;
    int64_t row, time, width;
} table;

/* Inner products of all times of a row with each other: in float within runs of columns, in double over all of them. */
INLINE void gram(const float *at, int64_t apart, int64_t width, int64_t times, double (*found)[MOST]) {
    floats sums[TILES][TILE][TILE], piece[MOST][PIECE / LANES];
    int64_t blocks = (times + TILE - 1) / TILE;
    memset(found, 0, (size_t)(blocks * TILE) * sizeof *found);
    for (int64_t first = 0; first < width; first += PIECE) {
        int64_t count = first + PIECE < width ? PIECE : width - first, vectors = (count + LANES - 1) / LANES;
        if (first % RUN == 0) memset(sums, 0, (size_t)(blocks * (blocks + 1) / 2) * sizeof *sums);
        for (int64_t t = 0; t < blocks * TILE; t++) {
            if (t >= times || count % LANES) memset(piece[t], 0, sizeof piece[t]);
            if (t < times) memcpy(piece[t], at + t * apart + first, (size_t)count * sizeof(float));
        }
        for (int64_t i = 0, tile = 0; i < blocks; i++)
            for (int64_t j = i; j < blocks; j++, tile++) {
                floats own[TILE][TILE];
                memcpy(own, sums[tile], sizeof own);
                for (int64_t v = 0; v < vectors; v++)
                    for (int a = 0; a < TILE; a++)
                        for (int b = 0; b < TILE; b++) own[a][b] += piece[i * TILE + a][v] * piece[j * TILE + b][v];
                memcpy(sums[tile], own, sizeof own);
            }
        if ((first + PIECE) % RUN && first + PIECE < width) continue;
        for (int64_t i = 0, tile = 0; i < blocks; i++)
            for (int64_t j = i; j < blocks; j++, tile++)
                for (int a = 0; a < TILE; a++)
                    for (int b = 0; b < TILE; b++) found[i * TILE + a][j * TILE + b] += lanes(sums[tile][a][b]);
    }
}

/* Squared norm of sum_t g_t (x_t, 1, ..)^T, the norms of its terms added, and whether squares stayed within `most`. */
INLINE void gram_row(const table *x, const table *g, int64_t i, int64_t times, double ones, double most, double *square,
                     double *reach, uint8_t *firm) {
    double inputs[MOST][MOST], gates[MOST][MOST], energies[2] = {0.0, 0.0};
    gram(x->at + i * x->row, x->time, x->width, times, inputs);
    gram(g->at + i * g->row, g->time, g->width, times, gates);
    *square = *reach = 0.0;
    for (int64_t s = 0; s < times; s++) {
        energies[0] += inputs[s][s];
        energies[1] += gates[s][s];
        *reach += sqrt((inputs[s][s] + ones) * gates[s][s]);
        *square += (inputs[s][s] + ones) * gates[s][s];
        for (int64_t t = s + 1; t < times; t++) *square += 2.0 * (inputs[s][t] + ones) * gates[s][t];
    }
    *firm = energies[0] >= 1.0 / most && energies[0] <= most && energies[1] >= 1.0 / most && energies[1] <= most;
}

/* Rows that several threads share; each takes the next few until there are none. */
typedef struct {
    table x, g;
    int64_t rows, times, next;
    double ones, most, *square, *reach;
    uint8_t *firm;
} grams;

/* A step that several threads share in the same way. */
typedef struct {
    float *gates, *cell, *state, *through, *forget;
    int64_t width, stride, rows, next;
} task;

#define VARIANT(name, attribute)                                                                                       \
    attribute static void forward_##name(const task *t, int64_t first, int64_t last) {                                 \
        for (int64_t i = first; i < last; i++)                                                                         \
            forward_row(t->gates + 4 * i * t->width, t->cell + i * t->width, t->state + i * t->stride,                 \
                        t->through + i * t->width, t->forget + i * t->width, t->width);                                \
    }                                                                                                                  \
    attribute static void back_##name(const task *t, int64_t first, int64_t last) {                                    \
        for (int64_t i = first; i < last; i++)                                                                         \
            back_row(t->gates + 4 * i * t->width, t->cell + i * t->width, t->state + i * t->stride,                    \
                     t->through + i * t->width, t->forget + i * t->width, t->width);                                   \
    }                                                                                                                  \
    attribute static void grams_##name(const grams *t, int64_t first, int64_t last) {                                  \
        for (int64_t i = first; i < last; i++)                                                                         \
            gram_row(&t->x, &t->g, i, t->times, t->ones, t->most, t->square + i, t->reach + i, t->firm + i);           \
    }

#include "simd_dispatch.h"

#define WORK(what)                                                                                                     \
    static void work_##what(void *given) {                                                                             \
        task *t = given;                                                                                               \
        for (;;) {                                                                                                     \
            int64_t first = __atomic_fetch_add(&t->next, SHARE, __ATOMIC_RELAXED);                                     \
            if (first >= t->rows) return;                                                                              \
            int64_t last = first + SHARE < t->rows ? first + SHARE : t->rows;                                          \
            CHOOSE(what, t, first, last);                                                                              \
        }                                                                                                              \
    }                                                                                                                  \
    void evenhand_lstm_##what(float *gates, float *cell, float *state, int64_t stride, float *through, float *forget,  \
                              int64_t rows, int64_t width, void (*team)(void (*)(void *), void *, unsigned, unsigned), \
                              unsigned threads) {                                                                      \
        task all = {gates, cell, state, through, forget, width, stride, rows, 0};                                      \
        if (team != NULL)                                                                                              \
            team(work_##what, &all, threads, 0);                                                                       \
        else                                                                                                           \
            work_##what(&all);                                                                                         \
    }

/* `state` has a row every `stride` numbers, the others a row after the other. `team` runs a function in several threads at
   once (OpenMP's GOMP_parallel), or is NULL. */
WORK(forward)
WORK(back)

static void work_grams(void *given) {
    grams *t = given;
    for (;;) {
        int64_t first = __atomic_fetch_add(&t->next, SHARE, __ATOMIC_RELAXED);
        if (first >= t->rows) return;
        int64_t last = first + SHARE < t->rows ? first + SHARE : t->rows;
        CHOOSE(grams, t, first, last);
    }
}

/* `shape` of a table: numbers from row to row, from time to time, and its width. At most MOST times. */
void evenhand_grams(const float *x, const int64_t *x_shape, const float *g, const int64_t *g_shape, int64_t rows,
                    int64_t times, double ones, double most, double *square, double *reach, uint8_t *firm,
                    void (*team)(void (*)(void *), void *, unsigned, unsigned), unsigned threads) {
    grams all = {{x, x_shape[0], x_shape[1], x_shape[2]}, {g, g_shape[0], g_shape[1], g_shape[2]}, rows, times, 0,
                 ones, most, square, reach, firm};
    if (team != NULL)
        team(work_grams, &all, threads, 0);
    else
        work_grams(&all);
}
