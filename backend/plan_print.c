/* A plan as text, one line a step: for tests and `engraft plan`. Says nothing of addresses, so that equal plans print
 * equally. */
#include <inttypes.h>

#include "backend/plan.h"

static void print_place(const egi_plan *plan, const egi_layout *layout, egi_text *out) {
  static const char *const kinds[] = {"none", "weight", "state", "input", "known", "fixed", "transient", "host"};
  const egi_storage *storage = &plan->storages[layout->storage];
  const egi_module *module = plan->graph->module;
  uint64_t offset = layout->offset_bytes;
  egi_text_add(out, kinds[storage->kind]);
  switch (storage->kind) {
  case EGI_STORAGE_WEIGHT:
    egi_text_format(out, " %s", module->weights[storage->index].name);
    break;
  case EGI_STORAGE_INPUT:
    egi_text_format(out, " %s", plan->graph->values[plan->graph->inputs[storage->index]].name);
    break;
  case EGI_STORAGE_STATE:
    egi_text_format(out, " pool %" PRIu32, storage->index);
    offset += storage->offset_bytes;
    break;
  default:
    offset += storage->offset_bytes;
    break;
  }
  if (offset != 0 || storage->kind >= EGI_STORAGE_FIXED || storage->kind == EGI_STORAGE_STATE) {
    egi_text_format(out, "+%" PRIu64, offset);
  }
}

static void print_operand(const egi_plan *plan, const egi_layout *layout, egi_text *out) {
  const egi_tensor *tensor = &layout->tensor;
  if (layout->storage == 0) {
    egi_text_add(out, "-");
    return;
  }
  egi_text_format(out, "%s[", egi_dtype_name(tensor->dtype));
  for (int i = 0; i < tensor->rank; i++) egi_text_format(out, "%s%" PRId64, i > 0 ? "," : "", tensor->dims[i]);
  egi_text_add(out, "]");
  if (!egi_tensor_is_contiguous(tensor)) {
    egi_text_add(out, "{");
    for (int i = 0; i < tensor->rank; i++) egi_text_format(out, "%s%" PRId64, i > 0 ? "," : "", tensor->strides[i]);
    egi_text_add(out, "}");
  }
  egi_text_add(out, " ");
  print_place(plan, layout, out);
}

static void print_run(const egi_plan *plan, const egi_step *step, egi_text *out) {
  const egi_node *node = &plan->graph->nodes[step->node];
  egi_text_format(out, "%s \"%s\":", step->kernel->name, node->name != NULL ? node->name : "");
  for (uint32_t i = 0; i < step->n_inputs + step->n_outputs; i++) {
    egi_text_add(out, i == step->n_inputs ? " -> " : i > 0 ? ", " : " ");
    print_operand(plan, &plan->operands[step->first_operand + i], out);
  }
  if (step->workspace != 0) {
    const egi_storage *storage = &plan->storages[step->workspace];
    egi_text_format(out, " workspace %" PRIu64 "+%" PRIu64, storage->size_bytes, storage->offset_bytes);
  }
}

static void print_list(const egi_plan *plan, const egi_step_list *list, const char *title, egi_text *out) {
  for (uint32_t s = 0; s < list->n_segments; s++) {
    const egi_segment *segment = &list->segments[s];
    egi_text_format(out, "%s %s\n", title, segment->kind == EGI_SEGMENT_CAPTURED ? "captured" : "eager");
    for (uint32_t i = segment->first_step; i < segment->first_step + segment->n_steps; i++) {
      const egi_step *step = &list->steps[i];
      egi_text_format(out, "  %u ", step->stream);
      switch (step->kind) {
      case EGI_STEP_RECORD:
        egi_text_format(out, "record %" PRIu32, step->event);
        break;
      case EGI_STEP_WAIT:
        egi_text_format(out, "wait %" PRIu32, step->event);
        break;
      default:
        print_run(plan, step, out);
        break;
      }
      egi_text_add(out, "\n");
    }
  }
}

void egi_plan_print(const egi_plan *plan, egi_text *out) {
  const egi_plan_bytes *bytes = &plan->bytes;
  egi_text_format(out,
                  "weights %" PRIu64 " states %" PRIu64 " saved %" PRIu64 " transient %" PRIu64 " workspace %" PRIu64
                  " fixed %" PRIu64 " inputs %" PRIu64 " known %" PRIu64 " pinned %" PRIu64 "\n",
                  bytes->weights, bytes->states, bytes->saved, bytes->transient, bytes->workspace, bytes->fixed,
                  bytes->inputs, bytes->known, bytes->pinned);
  print_list(plan, &plan->setup, "setup", out);
  print_list(plan, &plan->main, "run", out);
  for (uint32_t i = 0; i < plan->graph->n_outputs; i++) {
    egi_text_format(out, "output %s: ", plan->graph->values[plan->graph->outputs[i]].name);
    print_operand(plan, &plan->outputs[i], out);
    egi_text_add(out, "\n");
  }
}
