"""The watch over ranks: none waits for ever for one that is gone.

    watchdog     begins and ends the watch, and ends a rank that waits in vain
    watcher      the small process beside each rank: who is still there?
    rendezvous   connects these processes to that of rank 0
    waits        which threads of this process wait for other ranks, and which work

Knows no framework: each adapter says in its module ``workers`` when a process waits for others.
"""
