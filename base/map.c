/* Hash map from strings to 32-bit numbers: open addressing, linear probing, at most half full. */
#include "base/base.h"

#include <string.h>

struct egi_map_slot {
  const char *key; /* NULL: free */
  uint32_t hash;
  uint32_t value;
};

uint64_t egi_hash(const void *bytes, size_t length, uint64_t seed) {
  const uint8_t *byte = bytes;
  uint64_t hash = 14695981039346656037u ^ seed;
  for (size_t i = 0; i < length; i++) hash = (hash ^ byte[i]) * 1099511628211u;
  return hash;
}

static uint32_t hash_key(const char *key) {
  uint64_t hash = egi_hash(key, strlen(key), 0);
  return (uint32_t)(hash ^ (hash >> 32));
}

void egi_map_init(egi_map *map, egi_arena *arena) {
  memset(map, 0, sizeof *map);
  map->arena = arena;
}

/* The slot of the key, or the free one where it would go. */
static struct egi_map_slot *find_slot(const egi_map *map, const char *key, uint32_t hash) {
  uint32_t i = hash & (map->capacity - 1);
  while (map->slots[i].key != NULL && (map->slots[i].hash != hash || strcmp(map->slots[i].key, key) != 0))
    i = (i + 1) & (map->capacity - 1);
  return &map->slots[i];
}

bool egi_map_get(const egi_map *map, const char *key, uint32_t *out_value) {
  if (map->count == 0) return false;
  const struct egi_map_slot *slot = find_slot(map, key, hash_key(key));
  if (slot->key == NULL) return false;
  if (out_value != NULL) *out_value = slot->value;
  return true;
}

static eg_status grow(egi_map *map) {
  egi_map larger = *map;
  larger.capacity = map->capacity > 0 ? 2 * map->capacity : 16;
  larger.slots = EGI_NEW(map->arena, struct egi_map_slot, larger.capacity);
  if (larger.slots == NULL) return EG_ERROR_MEMORY;
  for (uint32_t i = 0; i < map->capacity; i++)
    if (map->slots[i].key != NULL) *find_slot(&larger, map->slots[i].key, map->slots[i].hash) = map->slots[i];
  *map = larger;
  return EG_OK;
}

eg_status egi_map_put(egi_map *map, const char *key, uint32_t value) {
  if (2 * (map->count + 1) > map->capacity) EG_TRY(grow(map));
  uint32_t hash = hash_key(key);
  struct egi_map_slot *slot = find_slot(map, key, hash);
  if (slot->key == NULL) map->count++;
  *slot = (struct egi_map_slot){key, hash, value};
  return EG_OK;
}

/* Closes the gap by moving back the entries behind it that may lie nearer to where their hash points. */
void egi_map_remove(egi_map *map, const char *key) {
  if (map->count == 0) return;
  struct egi_map_slot *slot = find_slot(map, key, hash_key(key));
  if (slot->key == NULL) return;
  uint32_t mask = map->capacity - 1;
  uint32_t hole = (uint32_t)(slot - map->slots);
  for (uint32_t i = (hole + 1) & mask; map->slots[i].key != NULL; i = (i + 1) & mask) {
    uint32_t home = map->slots[i].hash & mask;
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      map->slots[hole] = map->slots[i];
      hole = i;
    }
  }
  map->slots[hole].key = NULL;
  map->count--;
}
