"""This machine as a cloud of several regions: instances are processes, in network namespaces where there is root.

It has a market (zones that are full, prices, preemptions with and without notice) that is driven by hand or by a
timeline, so that all of the product can be tried, and tested, without an account anywhere.

Its API is the file system, so most modules are about processes instead of calls: `store` (files on disk), `spawn` and `host`
(the process that stands for a machine), `process_tree`, `log`, `user_commands` (`serve exec` and `serve ssh`), `controls`
(`serve local`). `translate`, `network` and `spot_market` (prices and capacity) have the roles that they have in other clouds;
`config` reads the files that a user writes.
"""
