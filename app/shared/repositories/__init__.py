"""Queries and changes of rows; every function works in a transaction that its caller has opened.

`events`      events of a job, numbered without gaps
`jobs`        create, find, cancel, retry, delete
`keys`        API keys
`leases`      claim, renew, release, end: which worker may work on a job
`models`      models that tenants upload
`outputs`     progress, events, layers, allocations, artifacts, reports; writes only under a lease
`statistics`  figures about all jobs, and about ended attempts
`sweeps`      work of the reconciler: notify, reclaim, expire
`tenants`     owners of jobs, and their quotas
`webhooks`    addresses that ends of jobs are reported to, and the deliveries
`works`       work on the results of finished jobs
"""
