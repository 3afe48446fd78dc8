/* eg_dataset_*: documents from files or from the caller. */
#include "api/api.h"

static eg_status wrap(eg_context *ctx, egi_documents *documents, eg_dataset **out_dataset) {
  eg_dataset *dataset = egi_allocate(ctx, EGI_PURPOSE_DATA, sizeof *dataset);
  if (dataset == NULL) {
    egi_documents_free(documents);
    return EG_ERROR_MEMORY;
  }
  *dataset = (eg_dataset){.ctx = ctx, .references = 1, .documents = documents};
  egi_context_retain(ctx);
  *out_dataset = dataset;
  return EG_OK;
}

eg_status eg_dataset_load(eg_context *context, const char *path, const eg_dataset_options *options,
                          eg_dataset **out_dataset) {
  eg_dataset_options known = EG_DATASET_OPTIONS_INIT;
  egi_documents *documents;
  if (context == NULL) return EG_ERROR_ARGUMENT;
  if (path == NULL || out_dataset == NULL)
    return egi_fail(context, EG_ERROR_ARGUMENT, "eg_dataset_load: NULL argument");
  EG_TRY(egi_read_options(context, options, &known, sizeof known));
  if (known.is_text)
    EG_TRY(egi_documents_read_text(context, path, known.sequence, &documents));
  else if (egi_has_suffix(path, ".safetensors"))
    EG_TRY(egi_documents_read_safetensors(context, path, known.sequence, &documents));
  else
    EG_TRY(egi_documents_read_jsonl(context, path, known.sequence, &documents));
  return wrap(context, documents, out_dataset);
}

eg_status eg_dataset_create(eg_context *context, const eg_document *documents, size_t n_documents,
                            eg_dataset **out_dataset) {
  egi_documents *copy;
  if (context == NULL) return EG_ERROR_ARGUMENT;
  if ((documents == NULL && n_documents > 0) || out_dataset == NULL)
    return egi_fail(context, EG_ERROR_ARGUMENT, "eg_dataset_create: NULL argument");
  EG_TRY(egi_documents_copy(context, documents, n_documents, &copy));
  return wrap(context, copy, out_dataset);
}

eg_status eg_dataset_create_examples(eg_context *context, const eg_example *examples, size_t n_examples,
                                     eg_dataset **out_dataset) {
  egi_documents *copy;
  if (context == NULL) return EG_ERROR_ARGUMENT;
  if ((examples == NULL && n_examples > 0) || out_dataset == NULL)
    return egi_fail(context, EG_ERROR_ARGUMENT, "eg_dataset_create_examples: NULL argument");
  EG_TRY(egi_documents_copy_examples(context, examples, n_examples, &copy));
  return wrap(context, copy, out_dataset);
}

void eg_dataset_destroy(eg_dataset *dataset) {
  egi_dataset_release(dataset);
}

size_t eg_dataset_document_count(const eg_dataset *dataset) {
  return dataset != NULL ? dataset->documents->n_documents : 0;
}
