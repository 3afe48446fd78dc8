/* Learning-rate schedules: the formulas of transformers/optimization.py (get_*_schedule_with_warmup, get_wsd_schedule
 * with linear warm-up and cosine decay), step counted from 0. */
#include "train/train.h"

#include <math.h>

/* The share of steps in which WSD decays; Hu et al., MiniCPM (2024), section 4.4: a tenth is enough. */
static const double decay_share = 0.1;

static double ramp(double step, double n_steps) {
  return step / fmax(1.0, n_steps);
}

static double half_cosine(double progress) {
  return fmax(0.0, 0.5 * (1.0 + cos(acos(-1.0) * progress)));
}

/* After the warm-up; `step` and `n_steps` do not count it. */
static double decayed(eg_schedule schedule, double step, double n_steps, double n_all) {
  double n_decay = ceil(decay_share * n_all), n_stable = fmax(0.0, n_steps - n_decay);
  switch (schedule) {
  case EG_SCHEDULE_CONSTANT:
    break;
  case EG_SCHEDULE_LINEAR:
    return fmax(0.0, ramp(n_steps - step, n_steps));
  case EG_SCHEDULE_COSINE:
    return half_cosine(ramp(step, n_steps));
  case EG_SCHEDULE_WSD:
    if (step < n_stable) break;
    return step < n_steps ? half_cosine(ramp(step - n_stable, n_steps - n_stable)) : 0.0;
  }
  return 1.0;
}

double egi_schedule_rate(eg_schedule schedule, double rate, uint64_t step, uint64_t n_steps, double warmup) {
  double t = (double)step, n = (double)n_steps;
  double n_warmup = warmup < 1.0 ? ceil(warmup * n) : floor(warmup);
  if (t < n_warmup) return rate * ramp(t, n_warmup);
  return rate * decayed(schedule, t - n_warmup, n - n_warmup, n);
}
