"""The watch over ranks: none waits for ever for one that is gone.

    watchdog     begins and ends the watch, and ends a rank that waits in vain
    heartbeat    who is still there: a small message a second between ranks
    door         how the ranks come to be connected for that

Knows no framework: each adapter says in its module ``waiting`` when a process waits for others.
"""
