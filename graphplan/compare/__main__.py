"""Build the guards in C++. This needs a C++ compiler and Python's headers, and takes about half a minute."""

import sys

from graphplan.compare.building import build

if __name__ == "__main__":
    sys.stdout.write(f"built {build()}\n")
