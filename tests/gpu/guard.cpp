// What autograd of a PyTorch without CUDA asks of the device of a tensor: one CUDA device, number 0, that is always ready.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {
struct ReadyDevice : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return {DeviceType::CUDA, 0}; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, ReadyDevice)
}  // namespace c10::impl

namespace at {
struct PresentCUDA : CUDAHooksInterface {
  explicit PresentCUDA(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PresentCUDA)
}  // namespace at
