"""`make bench`: every benchmark in turn; figures are ratios within one run, as machines differ."""

from benchmarks import allocation, profiling

if __name__ == "__main__":
    profiling.main()
    allocation.main()
