"""The watch over ranks: none waits for ever for one that is gone.

    watchdog     begins and ends the watch, and ends a rank that waits in vain
    waits        who of this process waits for other ranks: whoever waits registers
    threads      what Linux says of threads; which of them work and should finish first
    reporter     tells all that to a small process beside this one
    child        that process, which answers also while this one runs no Python
    heartbeat    who is still there: a small message a second between ranks
    rendezvous   connects all ranks to rank 0 for that

Knows no framework: each adapter says in its module ``waiting`` when a process waits for others.
"""
