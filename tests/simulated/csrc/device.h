// Devices, streams, events, memory and generators of the simulated accelerator.
#pragma once

#include "queues.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>

namespace simulated {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex NUM_DEVICES = 4;
// A byte of memory that nobody has written: not a number in all floating-point types.
constexpr int GARBAGE = 0xFF;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, NUM_DEVICES> current_streams{};

inline c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

inline StreamKey key_of(c10::Stream stream) { return (stream.id() << 8) | index_of(stream.device()); }

inline StreamKey current_stream(c10::DeviceIndex index) { return (current_streams[index] << 8) | index; }

// Memory

struct Block {
  void* pointer;
  size_t nbytes;
  c10::DeviceIndex device;
  StreamKey owner;
  std::set<StreamKey> users;  // other streams, from `record_stream`
};

// As torch's caching allocator: memory belongs to the stream that it was allocated on, which may write to it as soon as
// it is freed, and here does so. Streams that were recorded are done with it before.
class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(KIND, current_device);
    if (nbytes == 0) return {nullptr, device};
    auto* block = new Block{std::malloc(nbytes), nbytes, current_device, current_stream(current_device), {}};
    std::memset(block->pointer, GARBAGE, nbytes);
    allocated += static_cast<int64_t>(nbytes);
    most = std::max(most.load(), allocated.load());
    return {block->pointer, block, &Memory::free, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    auto* block = static_cast<Block*>(data.get_context());
    if (block != nullptr && key_of(stream) != block->owner) block->users.insert(key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes[0], &stats.reserved_bytes[0]}) {
      each->current = allocated;
      each->peak = most;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override { most = allocated.load(); }

  inline static std::atomic<int64_t> allocated{0}, most{0};

 private:
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    allocated -= static_cast<int64_t>(block->nbytes);
    auto overwrite = [block] { std::memset(block->pointer, GARBAGE, block->nbytes); };
    std::vector<Point> uses;
    for (auto stream : block->users) uses.push_back(queues().end(stream));
    if (uses.empty()) {
      queues().add(block->owner, overwrite);
    } else {
      uses.push_back(queues().end(block->owner));
      queues().when(uses, overwrite);
    }
    // Until then, a task that runs too late finds the garbage.
    queues().when_idle([block] {
      std::free(block->pointer);
      delete block;
    });
  }
};

inline Memory& memory() {
  static auto* all = new Memory();
  return *all;
}

// Page-locked memory of the host. Work that copies from or to it holds it.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    auto* pointer = static_cast<char*>(std::malloc(std::max<size_t>(nbytes, 1)));
    std::memset(pointer, GARBAGE, nbytes);
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[pointer] = nbytes;
    return {pointer, pointer, &PinnedMemory::free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &PinnedMemory::free; }
  void copy_data(void* target, const void* source, size_t nbytes) const override { std::memcpy(target, source, nbytes); }

  static bool contains(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = sizes_.upper_bound(static_cast<const char*>(data));
    if (next == sizes_.begin()) return false;
    auto& [start, nbytes] = *std::prev(next);
    return static_cast<const char*>(data) < start + std::max<size_t>(nbytes, 1);
  }

 private:
  static void free(void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_.erase(static_cast<char*>(pointer));
    std::free(pointer);
  }

  inline static std::mutex& mutex_ = *new std::mutex();
  inline static std::map<const char*, size_t>& sizes_ = *new std::map<const char*, size_t>();
};

// Generators

// A generator of the host under the name of the device.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(c10::DeviceIndex index, at::Generator numbers = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(KIND, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(std::move(numbers)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "has no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override {
    auto found = c10::detail::getNonDeterministicRandom();
    host.set_current_seed(found);
    return found;
  }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return KIND; }

  at::Generator host;

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::array<at::Generator, NUM_DEVICES>();
    for (c10::DeviceIndex each = 0; each < NUM_DEVICES; each++) (*made)[each] = at::make_generator<Generator>(each);
    return made;
  }();
  return (*all)[index == -1 ? current_device : index];
}

// Devices, streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {KIND, std::exchange(current_device, index_of(device))};
  }
  c10::Device getDevice() const override { return {KIND, current_device}; }
  void setDevice(c10::Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }

  c10::Stream stream_of(c10::StreamId id, c10::Device device) const {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, index_of(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(current_streams[index_of(device)], device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(0, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> num_made{0};
    return stream_of(++num_made, device);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto index = index_of(stream.device());
    return stream_of(std::exchange(current_streams[index], stream.id()), stream.device());
  }
  bool queryStream(const c10::Stream& stream) const override {
    queues().run_one(key_of(stream));
    return queues().reached(queues().end(key_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override { queues().run_to(queues().end(key_of(stream))); }
  void synchronizeDevice(const c10::DeviceIndex) const override { queues().run_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    memory().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Point();
    *static_cast<Point*>(*event) = queues().end(key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* point = static_cast<Point*>(event);
    if (point != nullptr && point->stream != key_of(stream)) queues().wait(key_of(stream), *point);
  }
  bool queryEvent(void* event) const override {
    auto* point = static_cast<Point*>(event);
    if (point == nullptr || queues().reached(*point)) return true;
    queues().run_one(point->stream);
    return false;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) queues().run_to(*static_cast<Point*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Point*>(event); }
};

// Gives `storage` a size; its values move with the work of the current stream.
inline void resize(const c10::Storage& storage, size_t nbytes) {
  auto device = storage.device();
  auto before = std::exchange(current_device, index_of(device));
  auto moved = memory().allocate(nbytes);
  current_device = before;
  auto* target = moved.get();
  const auto* source = storage.data();
  auto num_kept = std::min(nbytes, storage.nbytes());
  if (num_kept > 0)
    queues().add(current_stream(index_of(device)), [=] { std::memcpy(target, source, num_kept); });
  storage.set_data_ptr(std::move(moved));  // frees the previous memory, after the copy
  storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return std::exchange(current_device, index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override { return PinnedMemory::contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static auto* all = new PinnedMemory();
    return all;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index == -1 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {KIND, current_device}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override { resize(storage, nbytes); }
};

}  // namespace simulated
