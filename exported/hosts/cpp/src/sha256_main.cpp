// Prints the sha256 of standard input, fed in pieces of as many bytes as the first argument says.

#include <cstdlib>
#include <iostream>

#include "sha256.hpp"

int main(int count, char** arguments) {
  std::string piece(count > 1 ? std::strtoul(arguments[1], nullptr, 10) : 4096, '\0');
  funcrt::Sha256 hash;
  while (std::cin.read(piece.data(), static_cast<std::streamsize>(piece.size())),
         std::cin.gcount() > 0) {
    hash.update({piece.data(), static_cast<size_t>(std::cin.gcount())});
  }
  std::cout << hash.finish() << "\n";
}
