// The part of the program that is linked to MLX.

#include "run.hpp"

#include "bundle.hpp"
#include "error.hpp"
#include "generate.hpp"
#include "mlx/device.h"
#include "mlx/version.h"
#include "verify.hpp"

namespace mx = mlx::core;

namespace funcrt {
namespace {

void choose_device(const Options& options) {
  if (!options.on_gpu) {
    return;
  }
  const mx::Device device(*options.on_gpu ? mx::Device::gpu : mx::Device::cpu);
  if (!mx::is_available(device)) {
    throw Error("--device: this MLX has no such device here");
  }
  mx::set_default_device(device);
}

void print_info(const Bundle& bundle, const std::string& blas) {
  std::cout << "BLAS " << blas << "\nMLX " << mx::version() << "\ndevice class " << device_class()
            << "\n";
  for (const Function& function : bundle.manifest().functions) {
    std::cout << function.key() << ": " << join(function.inputs) << (function.state ? ", state" : "")
              << " -> " << join(function.outputs) << (function.state ? ", state" : "") << "\n";
  }
}

int run(const Options& options, const std::string& blas) {
  std::cerr << "BLAS " << blas << std::endl;
  choose_device(options);
  Bundle bundle(options.bundle, options.params_files, options.mode == Mode::verify);
  if (options.mode == Mode::verify) {
    return verify(bundle) ? 0 : 1;
  }
  if (options.mode == Mode::info) {
    print_info(bundle, blas);
  } else {
    generate(bundle, options);
  }
  return 0;
}

}  // namespace
}  // namespace funcrt

extern "C" int funcrt_run_options(const funcrt::Options& options, const std::string& blas) {
  try {
    return funcrt::run(options, blas);
  } catch (const std::exception& error) {
    return funcrt::report(error.what(), 1);
  }
}
