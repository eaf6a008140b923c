// The table of handles: objects.h.
#include "objects.h"

namespace compiled {
namespace {

struct Row {
  std::shared_ptr<Object> object;
  uint32_t used = 0;
};

// Bit 62 alone is set above bit 47 of no address, so a handle that is followed faults.
constexpr uint64_t MARK = uint64_t(1) << 62;
constexpr uint32_t MOST_USED = (uint32_t(1) << 29) - 1;  // a row that was used so often is used no more

// never destroyed: threads of a backend may call in while the process ends
struct Table {
  std::mutex lock;
  std::vector<Row> rows;
  std::vector<uint32_t> unused;
};

Table& table() {
  static Table* made = new Table;
  return *made;
}

Row* row_of(Table& all, Handle handle) {
  const uint64_t number = reinterpret_cast<uint64_t>(handle);
  const uint64_t place = number & 0xffffffffu, used = (number & ~MARK) >> 32;
  if (!(number & MARK) || place >= all.rows.size()) return nullptr;
  Row& row = all.rows[place];
  return row.used == used && row.object ? &row : nullptr;
}

}  // namespace

Handle enter(std::shared_ptr<Object> object) {
  Table& all = table();
  std::lock_guard<std::mutex> held(all.lock);
  uint32_t place;
  if (all.unused.empty()) {
    place = uint32_t(all.rows.size());
    all.rows.emplace_back();
  } else {
    place = all.unused.back();
    all.unused.pop_back();
  }
  Row& row = all.rows[place];
  row.used++;
  row.object = std::move(object);
  return reinterpret_cast<Handle>(MARK | uint64_t(row.used) << 32 | place);
}

std::shared_ptr<Object> found(Handle handle, Kind kind) {
  Table& all = table();
  std::lock_guard<std::mutex> held(all.lock);
  Row* row = row_of(all, handle);
  if (row == nullptr || row->object->kind != kind) return nullptr;
  return row->object;
}

std::shared_ptr<Object> leave(Handle handle, Kind kind) {
  Table& all = table();
  std::lock_guard<std::mutex> held(all.lock);
  Row* row = row_of(all, handle);
  if (row == nullptr || row->object->kind != kind) return nullptr;
  if (row->used < MOST_USED) all.unused.push_back(uint32_t(row - all.rows.data()));
  return std::move(row->object);  // destroyed by the caller, without the lock
}

}  // namespace compiled
