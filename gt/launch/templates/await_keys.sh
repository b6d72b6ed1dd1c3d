n=0
until test -r "$GT_KEYS/client.key"; do
    n=$((n + 1))
    if test $n -gt {seconds}; then
        echo "gt.launch.slurm: $(hostname) does not see $GT_KEYS, where the first node has made the keys of the job;" \
            "give a directory that all nodes share with --directory" >&2
        exit 1
    fi
    sleep 1
done
exec "$0" "$@"
