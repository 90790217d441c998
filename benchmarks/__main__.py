"""`make bench`: every benchmark in turn; figures are ratios within one run, as machines differ."""

from benchmarks import allocation, profiling, second_job

if __name__ == "__main__":
    profiling.main()
    allocation.main()
    second_job.main()
