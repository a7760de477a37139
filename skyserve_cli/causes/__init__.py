"""Why a service, or a replica, is as it is: facts in, a short account out. Pure; `serve why` collects the facts."""
