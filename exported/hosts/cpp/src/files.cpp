#include "files.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "error.hpp"
#include "sha256.hpp"

namespace fs = std::filesystem;

namespace funcrt {
namespace {

constexpr size_t kChunk = 1 << 20;
constexpr const char* kAdvice = "copy the bundle again, or export it again";

/// A file to read; no pipe, on which one could wait for ever.
std::ifstream open(const fs::path& path) {
  std::error_code error;
  const bool usual = fs::is_regular_file(path, error);
  if (error || !usual) {
    throw Error(text("cannot read ", path.string(), ": ",
                     error ? error.message() : "it is not a file"));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw Error(text("cannot read ", path.string(), ": ", std::strerror(errno)));
  }
  return file;
}

}  // namespace

std::string read_file(const fs::path& path) {
  std::ifstream file = open(path);
  std::ostringstream bytes;
  if (file.peek() != std::ifstream::traits_type::eof()) {
    bytes << file.rdbuf();
  }
  if (file.bad() || !bytes) {
    throw Error(text("cannot read ", path.string()));
  }
  return std::move(bytes).str();
}

Folder::Folder(const std::string& path) : path_(path) {
  std::error_code error;
  root_ = fs::canonical(path_, error);
  if (error || !fs::is_directory(root_)) {
    throw Error(text(path, " is not a folder; a bundle is one that `funcrt export` made"));
  }
}

void Folder::check_size(const std::string& name, const FileEntry& entry) const {
  const fs::path path = path_ / name;
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  if (error || !fs::is_regular_file(real)) {
    throw Error(text(path.string(), " is missing: ", kAdvice));
  }
  if (std::mismatch(root_.begin(), root_.end(), real.begin(), real.end()).first != root_.end()) {
    throw Error(text(path.string(), " is a link out of the bundle; copy the file into it"));
  }
  if (const uint64_t size = fs::file_size(real); size != entry.size) {
    throw Error(text(path.string(), " is damaged: expected ", entry.size, " bytes, got ", size,
                     "; ", kAdvice));
  }
}

void Folder::check_hash(const std::string& name, const FileEntry& entry) const {
  check_size(name, entry);
  std::ifstream file = open(path_ / name);
  Sha256 hash;
  std::string chunk(kChunk, '\0');
  while (file.read(chunk.data(), kChunk), file.gcount() > 0) {
    hash.update({chunk.data(), static_cast<size_t>(file.gcount())});
  }
  if (hash.finish() != entry.sha256) {
    throw Error(text((path_ / name).string(),
                     " is damaged: its sha256 does not match manifest.json; ", kAdvice));
  }
}

std::string Folder::read(const std::string& name, const FileEntry& entry) const {
  check_size(name, entry);
  std::string bytes = read_file(path_ / name);
  if (sha256(bytes) != entry.sha256) {
    throw Error(text((path_ / name).string(),
                     " is damaged: its sha256 does not match manifest.json; ", kAdvice));
  }
  return bytes;
}

TemporaryFile::TemporaryFile(const std::string& bytes) {
  std::error_code error;
  const fs::path folder = fs::temp_directory_path(error);
  std::string name = ((error ? "/tmp" : folder) / "funcrt-XXXXXX").string();
  const int file = mkstemp(name.data());
  if (file < 0) {
    throw Error(text("cannot make a temporary file ", name, ": ", std::strerror(errno)));
  }
  path_ = name;
  bool complete = true;
  for (size_t done = 0; complete && done < bytes.size();) {
    const ssize_t count = ::write(file, bytes.data() + done, bytes.size() - done);
    complete = count > 0;
    done += complete ? static_cast<size_t>(count) : 0;
  }
  complete = ::close(file) == 0 && complete;
  if (!complete) {
    const std::string problem = std::strerror(errno);
    ::unlink(path_.c_str());
    throw Error(text("cannot write ", path_, ": ", problem));
  }
}

TemporaryFile::~TemporaryFile() { ::unlink(path_.c_str()); }

}  // namespace funcrt
