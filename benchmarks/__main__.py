"""The benchmarks of `make bench`; figures are ratios within one run, as machines differ."""

from benchmarks import allocation, profiling, second_job

if __name__ == "__main__":
    profiling.main()
    allocation.main()
    second_job.main()
