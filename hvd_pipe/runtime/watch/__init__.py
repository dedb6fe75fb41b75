"""The watch over ranks: none waits for ever for one that is gone.

    watchdog     begins and ends the watch, and ends a rank that waits in vain
    waits        which threads of this process wait for other ranks, and which work
    reporter     tells all that to a small process beside this one
    child        that process, which answers also while this one runs no Python
    link         a connection between two ranks, and what they tell each other by it
    heartbeat    who is still there: a small message a second between ranks
    rendezvous   connects all ranks to rank 0 for that

Knows no framework: each adapter says in its module ``waiting`` when a process waits for others.
"""
