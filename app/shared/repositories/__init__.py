"""What can be asked of and done to the rows; every function works inside a transaction that its caller opened.

`events`      what happened, numbered without gaps
`jobs`        create, find, cancel, retry, delete
`keys`        API keys: who may come in, as which tenant
`leases`      claim, keep, let go, end: who may work on a job
`outputs`     progress, events, layers, allocations, artifacts, reports; writes only under a lease
`statistics`  figures about all jobs, and about an attempt that is over
`sweeps`      what the reconciler does: announce, reclaim, expire
`tenants`     who owns jobs, and how much each may have
"""
