// Backends of the simulated accelerator for process groups: one as NCCL is for GPUs, another that passes for gloo, which
// torch lets carry no tensors of devices that it does not know.
//
// Results arrive on a stream of its own, which the current stream waits for when the work is waited for. The ranks
// exchange bytes through the store of the group. They do so when the collective is called, and wait for its operands
// then: the ranks' devices cannot run beside their hosts, so a rank that puts this off could keep another one waiting.
#include "device.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/utils/pybind.h>

namespace simulated {
namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

class Collective final : public c10d::Work {
 public:
  Collective(int rank, c10d::OpType kind, Point done, c10::DeviceIndex device)
      : Work(rank, kind), done_(done), device_(device) {}
  bool isCompleted() override { return queues().reached(done_); }
  bool isSuccess() const override { return true; }
  void synchronize() override { queues().wait(current_stream(device_), done_); }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

 private:
  Point done_;
  c10::DeviceIndex device_;
};

class StoreBackend final : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name)
      : Backend(rank, size),
        store_(std::move(store)),
        name_(std::move(name)),
        stream_(Guard().getNewStream({KIND, 0}, 0)) {}

  const std::string getBackendName() const override { return name_; }
  bool supportsSplitting() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { store_->setTimeout(timeout); }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto sum = reduced(exchanged(tensors.at(0)), options.reduceOp);
    return arriving(c10d::OpType::ALLREDUCE, {{tensors[0], sum}});
  }
  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto all = exchanged(tensors.at(0));
    return arriving(c10d::OpType::BROADCAST, {{tensors[0], all.at(options.rootRank)}});
  }
  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto all = exchanged(inputs.at(0));
    std::vector<std::pair<at::Tensor, at::Tensor>> arrived;
    for (int rank = 0; rank < getSize(); rank++) arrived.emplace_back(outputs.at(0).at(rank), all[rank]);
    return arriving(c10d::OpType::ALLGATHER, arrived);
  }
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    auto all = exchanged(input);
    auto parts = output.flatten().chunk(getSize());
    std::vector<std::pair<at::Tensor, at::Tensor>> arrived;
    for (int rank = 0; rank < getSize(); rank++) arrived.emplace_back(parts[rank], all[rank].flatten());
    return arriving(c10d::OpType::_ALLGATHER_BASE, arrived);
  }
  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto sum = reduced(exchanged(input), options.reduceOp).flatten().chunk(getSize())[getRank()];
    return arriving(c10d::OpType::_REDUCE_SCATTER_BASE, {{output.flatten(), sum}});
  }
  WorkPointer barrier(const c10d::BarrierOptions&) override {
    exchanged(at::empty({0}, at::TensorOptions().device(c10::Device(KIND, current_device))));
    return arriving(c10d::OpType::BARRIER, {});
  }

 private:
  // The tensors of all ranks, on the host.
  Tensors exchanged(const at::Tensor& tensor) {
    auto mine = tensor.cpu().contiguous();
    const auto* bytes = static_cast<const uint8_t*>(mine.data_ptr());
    store_->set(key(number_, getRank()), std::vector<uint8_t>(bytes, bytes + mine.nbytes()));
    Tensors found;
    for (int rank = 0; rank < getSize(); rank++) {
      auto part = at::empty_like(mine);
      auto value = store_->get(key(number_, rank));
      TORCH_CHECK(value.size() == part.nbytes(), "ranks are in different collectives");
      if (!value.empty()) std::memcpy(part.data_ptr(), value.data(), value.size());
      found.push_back(part);
    }
    // All ranks are past the collective before the previous one.
    if (number_ >= 2) store_->deleteKey(key(number_ - 2, getRank()));
    number_++;
    return found;
  }

  static std::string key(uint64_t number, int rank) { return std::to_string(number) + "/" + std::to_string(rank); }

  at::Tensor reduced(Tensors summands, const c10d::ReduceOp& how) const {
    auto found = summands.at(0);
    for (size_t rank = 1; rank < summands.size(); rank++) {
      switch (static_cast<c10d::ReduceOp::RedOpType>(how)) {
        case c10d::ReduceOp::SUM:
        case c10d::ReduceOp::AVG:
          found.add_(summands[rank]);
          break;
        case c10d::ReduceOp::MAX:
          found = found.maximum(summands[rank]);
          break;
        case c10d::ReduceOp::MIN:
          found = found.minimum(summands[rank]);
          break;
        default:
          TORCH_CHECK(false, "the simulated backend has no such reduction");
      }
    }
    return static_cast<c10d::ReduceOp::RedOpType>(how) == c10d::ReduceOp::AVG ? found.div_(getSize()) : found;
  }

  WorkPointer arriving(c10d::OpType kind, const std::vector<std::pair<at::Tensor, at::Tensor>>& arrived) {
    auto device = arrived.empty() ? current_device : arrived[0].first.device().index();
    auto stream = key_of(stream_);
    for (const auto& [target, source] : arrived) {
      auto options = target.options().device(c10::kCPU);
      auto view = at::from_blob(target.data_ptr(), target.sizes(), target.strides(), options);
      // Holds the target until then, as NCCL does.
      auto write = [target = target, view, source = source] {
        c10::impl::ForceDispatchKeyGuard plain(
            c10::DispatchKeySet(c10::DispatchKey::BackendSelect), c10::autograd_dispatch_keyset_with_ADInplaceOrView);
        view.copy_(source);
      };
      queues().add(stream, write);
    }
    return c10::make_intrusive<Collective>(getRank(), kind, queues().end(stream), device);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  c10::Stream stream_;
  uint64_t number_ = 0;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def(
      "backend",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const std::string& name)
          -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<StoreBackend>(store, rank, size, name);
      });
}

}  // namespace
}  // namespace simulated
