"""The contract that every cloud keeps, as tests that any package can run.

    pytest -p provisioners.contract.pytest_plugin --skyserve-cloud=my_cloud.testing:subject \\
        --pyargs provisioners.contract.suite provisioners.contract.troubles

`my_cloud.testing:subject` is called without arguments and makes a `provisioners.contract.machines.PluginSubject` or another
`Subject`. Needs pytest; nothing else of the product imports this package.
"""
