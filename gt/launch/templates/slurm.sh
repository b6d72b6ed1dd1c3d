#!/bin/sh
$options

exec $job
