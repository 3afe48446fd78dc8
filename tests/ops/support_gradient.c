/* Finite differences for the references that gradient kernels are compared with. */
#include "support_ops.h"

#include <math.h>

void ops_check_gradient(ops_tensor *variable, const double *gradient, double (*objective)(const void *context),
                        const void *context) {
  for (int64_t i = 0; i < ops_count(variable); i++) {
    double value = variable->values[i], step = 1e-5;
    variable->values[i] = value + step;
    double above = objective(context);
    variable->values[i] = value - step;
    double below = objective(context);
    variable->values[i] = value;
    double expected = (above - below) / (2 * step);
    if (!(fabs(gradient[i] - expected) <= 1e-6 + 1e-6 * fabs(expected)))
      fail_msg("gradient of element %lld is %.9g, differences say %.9g", (long long)i, gradient[i], expected);
  }
}
