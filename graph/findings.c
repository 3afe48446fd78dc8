/* What is wrong with a file, all of it in one error: failures that are the file's fault are noted, and the search goes
 * on. */
#include "graph/graph.h"

enum { MAX_TOLD = 12 };

void egi_findings_begin(egi_findings *findings, eg_context *ctx) {
  *findings = (egi_findings){.ctx = ctx, .status = EG_OK};
  egi_text_init(&findings->text, ctx);
}

static void add(egi_findings *findings, eg_status status, const char *message) {
  if (findings->count == 0) findings->status = status;
  if (findings->count++ >= MAX_TOLD) return;
  if (findings->text.length > 0) egi_text_add(&findings->text, "; ");
  egi_text_add(&findings->text, message);
}

bool egi_findings_note(egi_findings *findings, eg_status status) {
  bool is_noted = status == EG_ERROR_FORMAT || status == EG_ERROR_SHAPE || status == EG_ERROR_UNSUPPORTED ||
                  status == EG_ERROR_DATA;
  if (is_noted) add(findings, status, eg_context_error(findings->ctx));
  return is_noted;
}

void egi_findings_add(egi_findings *findings, eg_status status, const char *message) {
  add(findings, status, message);
}

eg_status egi_findings_end(egi_findings *findings) {
  eg_status status = findings->status;
  if (findings->count > MAX_TOLD) egi_text_format(&findings->text, "; and %u more", findings->count - MAX_TOLD);
  if (findings->count > 0) {
    eg_status text = egi_text_status(&findings->text);
    status = text != EG_OK ? text : egi_fail(findings->ctx, status, "%s", egi_text_string(&findings->text));
  }
  egi_text_free(&findings->text);
  return status;
}
