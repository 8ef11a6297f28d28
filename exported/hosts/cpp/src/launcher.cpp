// The program: reads the command line, puts a fast BLAS into the process, and only then loads the
// part that is linked to MLX, whose calls bind to what is there first.

#include <dlfcn.h>

#include <iostream>

#include "blas.hpp"
#include "error.hpp"
#include "options.hpp"
#include "run.hpp"

namespace funcrt {
namespace {

void* load(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(text("cannot load ", name, ": ", dlerror(), ": build funcrt_run again"));
  }
  return library;
}

int start(const std::vector<std::string>& arguments) {
  const Options options = parse_options(arguments);
  if (options.mode == Mode::help) {
    std::cout << kUsage;
    return 0;
  }
  Blas blas;
  void* host = load(FUNCRT_HOST_LIBRARY);
  blas.complete(host);
  const auto run = reinterpret_cast<Run*>(dlsym(host, kRunName));
  if (run == nullptr) {
    throw Error(text(FUNCRT_HOST_LIBRARY, " has no ", kRunName, ": build funcrt_run again"));
  }
  return run(options, blas.description());
}

}  // namespace
}  // namespace funcrt

int main(int count, char** arguments) {
  try {
    return funcrt::start({arguments + (count > 0), arguments + count});
  } catch (const funcrt::UsageError& error) {
    return funcrt::report(error.what(), 2);
  } catch (const std::exception& error) {
    return funcrt::report(error.what(), 1);
  }
}
