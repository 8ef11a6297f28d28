#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace funcrt {

/// SHA-256 (FIPS 180-4) of bytes that come in pieces.
class Sha256 {
 public:
  void update(std::string_view bytes);

  /// The hash of all bytes so far, in hexadecimal. Nothing may be added afterwards.
  std::string finish();

 private:
  void mix(const unsigned char* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> block_{};
  size_t held_ = 0;  // bytes in block_
  uint64_t total_ = 0;
};

std::string sha256(std::string_view bytes);

}  // namespace funcrt
