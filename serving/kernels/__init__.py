"""The native kernels of the CPU engine: C++ sources, the library built from them, and packed weights."""
