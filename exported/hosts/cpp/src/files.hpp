#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace funcrt {

/// What the manifest says of one file.
struct FileEntry {
  uint64_t size;
  std::string sha256;
  std::string header;  // sha256 of a safetensors header; empty: none is listed
};

/// The bytes of a file. Raises Error when it cannot be read.
std::string read_file(const std::filesystem::path& path);

/// The files of a bundle, checked against what its manifest lists. All raise Error.
class Folder {
 public:
  explicit Folder(const std::string& path);

  const std::filesystem::path& path() const { return path_; }

  /// Raises unless a file is there, of the listed size, and no link out of the folder.
  void check_size(const std::string& name, const FileEntry& entry) const;

  /// Raises unless all of a file is as listed.
  void check_hash(const std::string& name, const FileEntry& entry) const;

  /// The bytes of a file that is as listed.
  std::string read(const std::string& name, const FileEntry& entry) const;

 private:
  std::filesystem::path path_, root_;
};

/// A file of given contents that nobody else writes to, gone when this object is.
///
/// MLX reads graphs and arrays from files only; what was checked is copied here, because a file of
/// the bundle may be replaced between the check and the reading.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes);
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace funcrt
