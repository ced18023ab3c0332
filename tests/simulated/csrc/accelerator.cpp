// Simulated accelerator: a device in the memory of the host, whose work lags behind.
//
// An operator is run on meta tensors first, which gives the shapes of its results; then its computation, by the kernel
// of the CPU, is added to the current stream. Where that cannot be (the shape depends on values, or the result is a
// number), the host waits for the stream and computes at once. An operator that draws random numbers is run on zeros
// first, which moves the generator on; its computation begins at the generator's previous state.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace simulated {
namespace {

using torch::jit::Stack;
using c10::IValue;

// Dispatch as below autograd, autocast and the modes of Python, whatever the thread does that runs the work.
class PlainDispatch {
 public:
  PlainDispatch() : guard_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), above_backends()) {}

 private:
  static c10::DispatchKeySet above_backends() {
    return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet(
               {c10::DispatchKey::Python,
                c10::DispatchKey::PythonTLSSnapshot,
                c10::DispatchKey::PreDispatch,
                c10::DispatchKey::PythonDispatcher,
                c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                c10::DispatchKey::Functionalize});
  }
  c10::impl::ForceDispatchKeyGuard guard_;
};

bool is_here(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

// `made` counts as a Python number in type promotion if `tensor` does.
at::Tensor as_wrapped(const at::Tensor& tensor, const at::Tensor& made) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// Tensor of the host with the same memory.
at::Tensor host_view(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kCPU);
  auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  return as_wrapped(tensor, view);
}

// The argument of a kernel of the host: tensors of the host are copied, as the host may change them before it runs.
at::Tensor as_argument(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (is_here(tensor)) return host_view(tensor);
  auto copy = tensor.clone();
  return as_wrapped(tensor, copy);
}

at::Tensor as_meta(const at::Tensor& tensor) {
  // A number: all devices take those of the host.
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

template <typename Convert>
IValue converted(const IValue& value, c10::DeviceType kind, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> found;
    for (const at::Tensor& each : value.toTensorVector()) found.push_back(convert(each));
    return found;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> found;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      found.push_back(each ? std::optional(convert(*each)) : std::nullopt);
    return found;
  }
  if (value.isDevice() && value.toDevice().type() == KIND) return c10::Device(kind);
  if (value.isGenerator()) return IValue();  // see `DrawFrom`
  return value;
}

template <typename Convert>
Stack all_converted(const Stack& values, c10::DeviceType kind, const Convert& convert) {
  Stack found;
  for (const auto& each : values) found.push_back(converted(each, kind, convert));
  return found;
}

// Lets kernels of the host, which draw from the host's default generator, draw from another one.
class DrawFrom {
 public:
  explicit DrawFrom(at::Generator numbers)
      : lock_(exchange()), numbers_(std::move(numbers)), before_(host().get_state()) {
    host().set_state(numbers_.get_state());
  }
  ~DrawFrom() {
    numbers_.set_state(host().get_state());
    host().set_state(before_);
  }

 private:
  static std::mutex& exchange() {
    static auto* mutex = new std::mutex();
    return *mutex;
  }
  static at::Generator& host() {
    static auto* generator = new at::Generator(at::detail::getDefaultCPUGenerator());
    return *generator;
  }
  std::lock_guard<std::mutex> lock_;
  at::Generator numbers_;
  at::Tensor before_;
};

at::Tensor new_like(const at::Tensor& model, c10::Device device) {
  if (!model.defined()) return model;
  return at::empty_strided(
      model.sizes(), model.strides(), at::TensorOptions().dtype(model.scalar_type()).device(device));
}

bool gives_tensors(const c10::FunctionSchema& schema) {
  for (const auto& each : schema.returns()) {
    auto kind = each.type()->kind();
    bool is_list = kind == c10::TypeKind::ListType &&
        each.type()->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType;
    if (kind != c10::TypeKind::TensorType && !is_list) return false;
  }
  return true;
}

// The argument that a result is, as that of an operator in place; -1 if it is new.
int argument_of(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (result.alias_info() == nullptr) return -1;
  for (size_t number = 0; number < schema.arguments().size(); number++) {
    const auto* alias = schema.arguments()[number].alias_info();
    if (alias != nullptr && alias->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int>(number);
  }
  TORCH_CHECK(false, "the simulated accelerator has no ", schema.operator_name());
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    auto nbytes = static_cast<size_t>((self.storage_offset() + self.numel()) * self.itemsize());
    if (nbytes > self.storage().nbytes()) resize(self.storage(), nbytes);
  }
  return self;
}

// Results with the shapes of `models`; those that are arguments are resized if they must be.
Stack new_results(const c10::FunctionSchema& schema, const Stack& arguments, const Stack& models, c10::Device device) {
  Stack results;
  for (size_t number = 0; number < models.size(); number++) {
    auto argument = argument_of(schema, schema.returns()[number]);
    if (argument == -1) {
      results.push_back(converted(models[number], KIND, [&](auto& model) { return new_like(model, device); }));
      continue;
    }
    results.push_back(arguments[argument]);
    if (models[number].isTensor()) resize_(arguments[argument].toTensor(), models[number].toTensor().sizes());
  }
  return results;
}

void copy_values(const IValue& source, const IValue& target) {
  if (source.isTensor()) {
    if (source.toTensor().defined()) target.toTensor().copy_(source.toTensor());
    return;
  }
  auto sources = source.toTensorVector(), targets = target.toTensorVector();
  for (size_t number = 0; number < sources.size(); number++) copy_values(sources[number], targets[number]);
}

at::Tensor as_zeros(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return as_wrapped(tensor, as_argument(tensor).clone().zero_());
}

// Results without values. `drawn`: the generator to draw from, of an operator that does.
std::optional<Stack> shapes_of(
    const c10::OperatorHandle& op, const Stack& arguments, const std::optional<at::Generator>& drawn) {
  try {
    auto found =
        drawn ? all_converted(arguments, c10::kCPU, as_zeros) : all_converted(arguments, c10::kMeta, as_meta);
    std::optional<DrawFrom> drawing;
    if (drawn) drawing.emplace(*drawn);
    op.callBoxed(&found);
    return found;
  } catch (const std::exception&) {
    return std::nullopt;  // They depend on values; or the arguments are wrong, which the kernel of the host says.
  }
}

c10::Device device_of(const Stack& arguments) {
  std::optional<c10::Device> found;
  auto look = [&](const at::Tensor& tensor) {
    if (!found && is_here(tensor)) found = tensor.device();
    return tensor;
  };
  for (const auto& each : arguments) {
    if (each.isDevice() && !found) found = c10::Device(KIND, index_of(each.toDevice()));
    converted(each, KIND, look);
  }
  return found.value_or(c10::Device(KIND, current_device));
}

at::Generator generator_in(const Stack& arguments, c10::Device device) {
  auto found = default_generator(device.index());
  for (const auto& each : arguments)
    if (each.isGenerator()) found = each.toGenerator();
  return static_cast<Generator*>(found.unsafeGetGeneratorImpl())->host;
}

// Computes at once, when everything before it is done.
Stack computed(
    const c10::OperatorHandle& op,
    const Stack& arguments,
    c10::Device device,
    const std::optional<at::Generator>& drawn) {
  const auto& schema = op.schema();
  queues().run_to(queues().end(current_stream(device.index())));
  auto found = all_converted(arguments, c10::kCPU, as_argument);
  {
    std::optional<DrawFrom> drawing;
    if (drawn) drawing.emplace(*drawn);
    op.callBoxed(&found);
  }
  if (!gives_tensors(schema)) return found;
  auto results = new_results(schema, arguments, found, device);
  for (size_t number = 0; number < found.size(); number++)
    if (argument_of(schema, schema.returns()[number]) == -1)
      copy_values(found[number], converted(results[number], c10::kCPU, as_argument));
  return results;
}

// Adds the computation to the current stream.
Stack put_off(
    const c10::OperatorHandle& op,
    const Stack& arguments,
    const Stack& shapes,
    c10::Device device,
    const std::optional<at::Generator>& drawn) {
  const auto& schema = op.schema();
  auto results = new_results(schema, arguments, shapes, device);
  std::vector<IValue> outputs;  // for those that are no arguments
  for (size_t number = 0; number < results.size(); number++)
    outputs.push_back(
        argument_of(schema, schema.returns()[number]) == -1 ? converted(results[number], c10::kCPU, as_argument)
                                                           : IValue());
  auto work = [op, inputs = all_converted(arguments, c10::kCPU, as_argument), outputs, drawn] {
    PlainDispatch plain;
    auto found = inputs;
    std::optional<DrawFrom> drawing;
    if (drawn) drawing.emplace(*drawn);
    op.callBoxed(&found);
    for (size_t number = 0; number < found.size(); number++)
      if (!outputs[number].isNone()) copy_values(found[number], outputs[number]);
  };
  queues().add(current_stream(device.index()), work);
  return results;
}

void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  PlainDispatch plain;
  const auto& schema = op.schema();
  auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  Stack arguments(first, stack->end());
  stack->erase(first, stack->end());
  auto device = device_of(arguments);
  std::optional<at::Generator> numbers, before;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    numbers = generator_in(arguments, device);
    before = numbers->clone();
  }
  auto shapes = gives_tensors(schema) ? shapes_of(op, arguments, numbers) : std::nullopt;
  auto results = shapes ? put_off(op, arguments, *shapes, device, before) : computed(op, arguments, device, numbers);
  stack->insert(stack->end(), results.begin(), results.end());
}

// Memory and views

at::Tensor empty(
    c10::SymIntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      &memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &memory(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_to(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat>) {
  return resize_(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({numel});
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

// Copies

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  auto device = is_here(source) ? source.device() : target.device();
  auto stream = current_stream(device.index());
  PlainDispatch plain;
  auto host = is_here(source) && is_here(target) ? at::Tensor() : is_here(source) ? target : source;
  bool is_pinned = host.defined() && PinnedMemory::contains(host.data_ptr());
  // What is not page-locked has been read when the call returns.
  auto from = is_here(source) || is_pinned ? host_view(source) : source.clone();
  auto keep = is_pinned ? host.storage() : c10::Storage();
  queues().add(stream, [from, to = host_view(target), keep] {
    PlainDispatch plain;
    to.copy_(from);
  });
  if (host.defined() && !(non_blocking && (is_pinned || is_here(target)))) queues().run_to(queues().end(stream));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  resize_(target, source.sizes());
  return copy_from(source, target, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) { memory().recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("view.dtype", at::native::view_dtype);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_to);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", record_stream);
  // In one operator, as on the CPU, whose bits they have then.
  for (auto name : {"native_layer_norm", "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_operator>());
}

TORCH_LIBRARY_FRAGMENT(simulated, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return std::optional(default_generator(static_cast<c10::DeviceIndex>(device)));
  });
  m.def("seed(int number) -> ()", [](int64_t number) { queues().seed(static_cast<uint64_t>(number)); });
  m.def("device_count() -> int", [] { return static_cast<int64_t>(NUM_DEVICES); });
  m.def("current_device() -> int", [] { return static_cast<int64_t>(current_device); });
  m.def("set_device(int index) -> ()", [](int64_t index) { current_device = static_cast<c10::DeviceIndex>(index); });
}

const bool is_registered = [] {
  at::SetAllocator(KIND, &memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace simulated
