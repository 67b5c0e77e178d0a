"""`dlc bench`: what links and hosts can do, measured before a run is started.

    limits · flow · transfer · host · schedule     pure: numbers and machines without clock, sockets or threads
    stream · link · serve · matrix                 the same over the transport
    allreduce · codec                              the library on this host, or on several
    memory                                         whether a measurement fits this host
    plain · show · heatmap                         reports for programs and for people

Nothing here is part of a run, and a run needs nothing of it.
"""
