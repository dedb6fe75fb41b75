"""The watch over ranks: none waits for ever for one that is gone.

    rank_side       in the rank: starts its child process, and says what the rank does
    child_process   in the child process: hears of the others, and ends its rank for a lost one
    rendezvous      connects the child processes to that of rank 0
    waits           which threads of a process wait for other ranks, and which work

Knows no framework: each adapter says in its module ``workers`` when a process waits for others.
"""
