/* Hand-made ONNX bytes and temporary directories. */
#define _XOPEN_SOURCE 700

#include "support_wire.h"

#include <assert.h>
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

void wire_varint(wire_bytes *out, uint64_t value) {
  assert(out->size + 10 <= sizeof(out->data));
  for (; value >= 0x80; value >>= 7) out->data[out->size++] = (uint8_t)(value | 0x80);
  out->data[out->size++] = (uint8_t)value;
}

void wire_tag(wire_bytes *out, uint32_t field, unsigned wire_type) {
  wire_varint(out, (uint64_t)field << 3 | wire_type);
}

void wire_number(wire_bytes *out, uint32_t field, uint64_t value) {
  wire_tag(out, field, TAG_VARINT);
  wire_varint(out, value);
}

void wire_data(wire_bytes *out, uint32_t field, const void *bytes, size_t size) {
  wire_tag(out, field, TAG_BYTES);
  wire_varint(out, size);
  assert(out->size + size <= sizeof(out->data));
  if (size) memcpy(out->data + out->size, bytes, size);
  out->size += size;
}

void wire_text(wire_bytes *out, uint32_t field, const char *text) {
  wire_data(out, field, text, strlen(text));
}

void wire_message(wire_bytes *out, uint32_t field, const wire_bytes *inner) {
  wire_data(out, field, inner->data, inner->size);
}

static void add_property(wire_bytes *out, uint32_t field, const char *key, const char *value) {
  wire_bytes property = {.size = 0};
  wire_text(&property, 1, key);
  wire_text(&property, 2, value);
  wire_message(out, field, &property);
}

/* x: float["batch", 2] */
static void add_value(wire_bytes *graph, uint32_t field, const char *name) {
  wire_bytes value = {.size = 0}, type = {.size = 0}, tensor = {.size = 0}, shape = {.size = 0}, dim = {.size = 0};
  wire_text(&dim, 2, "batch");
  wire_message(&shape, 1, &dim);
  dim.size = 0;
  wire_number(&dim, 1, 2);
  wire_message(&shape, 1, &dim);
  wire_number(&tensor, 1, 1);
  wire_message(&tensor, 2, &shape);
  wire_message(&type, 1, &tensor);
  wire_text(&value, 1, name);
  wire_message(&value, 2, &type);
  wire_message(graph, field, &value);
}

static void add_weights(wire_bytes *graph) {
  static const float numbers[2] = {1.5F, -2.0F};
  wire_bytes tensor = {.size = 0};
  wire_number(&tensor, 1, 2);
  wire_number(&tensor, 2, 1);
  wire_text(&tensor, 8, "raw");
  wire_data(&tensor, 9, numbers, sizeof(numbers));
  wire_number(&tensor, 99, 7); /* unknown, nested */
  wire_message(graph, 5, &tensor);
  tensor.size = 0;
  wire_number(&tensor, 1, 2);
  wire_number(&tensor, 2, 1);
  wire_data(&tensor, 4, numbers, sizeof(numbers));
  wire_text(&tensor, 8, "typed");
  wire_message(graph, 5, &tensor);
}

static void add_node(wire_bytes *out, uint32_t field, const char *const names[4]) {
  wire_bytes node = {.size = 0}, attribute = {.size = 0};
  wire_text(&node, 1, names[1]);
  wire_text(&node, 1, names[2]);
  wire_text(&node, 2, names[3]);
  wire_text(&node, 3, "node");
  wire_text(&node, 4, names[0]);
  wire_text(&attribute, 1, "note");
  wire_text(&attribute, 4, "a text");
  wire_number(&attribute, 20, 3);
  wire_message(&node, 5, &attribute);
  add_property(&node, 9, "key", "value");
  wire_text(&node, 1000, "unknown field of a node");
  wire_message(out, field, &node);
}

void wire_small_model(wire_bytes *out) {
  wire_bytes graph = {.size = 0}, import = {.size = 0}, function = {.size = 0};
  out->size = 0;
  wire_number(&import, 2, 23);
  add_node(&graph, 1, (const char *const[4]){"Add", "x", "raw", "t"});
  add_node(&graph, 1, (const char *const[4]){"Mul", "t", "typed", "y"});
  wire_text(&graph, 2, "small");
  add_weights(&graph);
  add_value(&graph, 11, "x");
  add_value(&graph, 12, "y");
  add_value(&graph, 13, "t");
  add_property(&graph, 16, "who", "a test");
  wire_number(out, 1, 10);
  wire_text(out, 2, "hand");
  wire_message(out, 7, &graph);
  wire_message(out, 8, &import);
  wire_text(&function, 1, "Double");
  wire_text(&function, 4, "a");
  wire_text(&function, 5, "b");
  add_node(&function, 7, (const char *const[4]){"Add", "a", "a", "b"});
  wire_message(&function, 9, &import);
  wire_text(&function, 10, "local");
  wire_message(out, 25, &function);
  wire_tag(out, 500, TAG_FIXED32); /* unknown, at the top */
  memcpy(out->data + out->size, "\1\2\3\4", 4);
  out->size += 4;
}

void support_make_directory(char *out_path, size_t capacity) {
  static const char pattern[] = "engraft-test-XXXXXX";
  assert(capacity >= sizeof(pattern));
  memcpy(out_path, pattern, sizeof(pattern));
  char *made = mkdtemp(out_path);
  assert(made);
  (void)made;
}

void support_remove_directory(const char *path) {
  char child[1024];
  DIR *directory = opendir(path);
  if (!directory) {
    unlink(path);
    return;
  }
  for (struct dirent *entry = readdir(directory); entry; entry = readdir(directory)) {
    struct stat info;
    if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
    snprintf(child, sizeof(child), "%s/%s", path, entry->d_name);
    if (!lstat(child, &info) && S_ISDIR(info.st_mode))
      support_remove_directory(child);
    else
      unlink(child);
  }
  closedir(directory);
  rmdir(path);
}

void support_write_file(const char *directory, const char *name, const void *bytes, size_t size) {
  char path[1024];
  snprintf(path, sizeof(path), "%s/%s", directory, name);
  FILE *file = fopen(path, "wb");
  assert(file);
  size_t written = size ? fwrite(bytes, 1, size, file) : 0;
  assert(written == size);
  (void)written;
  fclose(file);
}
